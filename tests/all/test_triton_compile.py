"""Compiles every Triton kernel for sm_80, sm_90 and sm_100 and checks tensor cores, shared memory, the absence of
atomics, and what the passes of the canonical layer execute for an input capsule.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capsfast
from capsfast import toolchain

from ..support import triton_table

if toolchain._why_not_installed():
    pytest.skip(toolchain._why_not_installed(), allow_module_level=True)

Row = dict[str, Any]
CAPABILITIES = (80, 90, 100)
# Shared memory that every GPU from 8.0 on gives a program: 99 KiB on 8.6, 8.9 and 12.0, more on the others.
SHARED = 99 * 1024
ALL = {"logits": "BIJ", "mask": True, "out_mask": True, "leaky": True, "bias": True}
# The options of a pass between two updates of EM routing.
EM = {"precision": True, "center": True, "prior": True, "activation": True, "second": True}
# Layers people train (B and I are not compiled in), one with every option, and both softmaxes.
CALLS: dict[str, Row] = {
    "float32": {"shape": triton_table.SHAPE, "dtype": "float32", "case": {"coupling": False}},
    "last": {"shape": triton_table.SHAPE, "dtype": "float32", "need": [], "kernels": ["accumulate_kernel"]},
    "coupling": {
        "shape": triton_table.SHAPE,
        "dtype": "float32",
        "case": {"softmax": "in"},
        "need": [],
        "kernels": ["accumulate_kernel"],
    },
    "moments": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "op": "routing_pass", "case": EM, "need": []},
    "update": {"shape": [32, 10, 16], "dtype": "float32", "op": "em_update"},
    # With few input capsules the batch is split.
    "partial dW": {
        "shape": [64, 2, 10, 16, 8],
        "dtype": "float32",
        "case": {"coupling": False},
        "kernels": ["add_up_kernel"],
    },
}
LOOPS = ["accumulate_kernel", "row_norm_kernel", "accumulate_gradient_kernel", "gradient_kernel"]
MORE_CALLS: dict[str, Row] = {
    "bfloat16": {"shape": triton_table.SHAPE, "dtype": "bfloat16", "case": {"coupling": False}},
    "votes": {"shape": [32, 64, 10, 16, 1], "dtype": "float32", "op": "route_votes", "kernels": LOOPS},
    "J=100, logits": {
        "shape": [16, 32, 100, 16, 8],
        "dtype": "float32",
        "case": {"logits": "BIJ"},
        "kernels": ["accumulate_kernel", "accumulate_gradient_kernel"],
    },
    "D=512": {"shape": [16, 16, 2, 512, 64], "dtype": "float32", "case": {"coupling": False}, "kernels": LOOPS},
    "softmax in": {
        "shape": [32, 64, 10, 16, 8],
        "dtype": "float32",
        "case": {"softmax": "in", **ALL},
        "kernels": ["gradient_kernel"],
    },
    "pose matrices": {
        "shape": [32, 64, 10, 16, 4],
        "dtype": "float32",
        "op": "routing_pass",
        "case": {**EM, "poses": 4},
        "need": [],
    },
    "positions": {
        "shape": [2, 64, 10, 16, 1],
        "dtype": "float32",
        "op": "votes_pass",
        "case": {"query": True, "spatial": [16, 16]},
    },
}
# With --all also calls that differ little from the calls above.
MOST_CALLS: dict[str, Row] = {
    "EM": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "op": "routing_pass", "case": EM},
    "shared weight": {"shape": [32, 64, 4, 64, 64], "dtype": "float32", "case": {"shared": True, "coupling": False}},
    "J=1000": {"shape": [16, 32, 1000, 16, 8], "dtype": "float32", "need": []},
    "tf32": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "case": {"coupling": False}, "tf32": True},
    "K=64": {"shape": [32, 64, 10, 64, 64], "dtype": "float32", "case": {"coupling": False}},
    "float16": {"shape": [32, 64, 10, 16, 16], "dtype": "float16", "case": {"coupling": False}},
    "r=5": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "case": {"coupling": False, "num_iterations": 5}},
    "all options": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "case": {**ALL, "logits": "IJ"}},
    "J=1000, backward": {"shape": [16, 32, 1000, 16, 8], "dtype": "float32"},
    "pose matrices, backward": {
        "shape": [32, 64, 10, 16, 4],
        "dtype": "float32",
        "op": "routing_pass",
        "case": {**EM, "poses": 4},
    },
    "EM, J=1000": {"shape": [16, 32, 1000, 16, 8], "dtype": "float32", "op": "routing_pass", "case": EM},
    "EM, shared votes": {
        "shape": [32, 64, 10, 16, 1],
        "dtype": "bfloat16",
        "op": "votes_pass",
        "case": {**EM, "shared": "J", "query": True},
    },
    "EM, in": {
        "shape": [32, 64, 10, 16, 8],
        "dtype": "float32",
        "op": "routing_pass",
        "case": {**EM, "query": True, "normalize": "in", "weights": True, "lse": True},
    },
    "largest update": {
        "shape": [32, 128, 32],
        "dtype": "float32",
        "op": "em_update",
        "case": {"momentum": 0.1, "isotropic": True, "nonlinearity": "softmax"},
    },
    "J=32": {"shape": [32, 64, 32, 16, 16], "dtype": "float32", "case": {"coupling": False}},
}
MAKES_VOTES = ("accumulate_kernel", "accumulate_gradient_kernel", "gradient_kernel", "row_norm_kernel")


def start(calls: dict[str, Row], *what: str) -> "subprocess.Popen[str]":
    root = Path(capsfast.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    listed = [{"op": "dynamic_routing", **call, "name": name} for name, call in calls.items()]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.triton_compile", *what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(listed))
    process.stdin.close()
    process.stdin = None
    return process


@pytest.fixture(scope="module")
def rows(pytestconfig: pytest.Config) -> list[Row]:
    """One row per kernel, call and capability."""
    found = []
    more = MORE_CALLS
    if pytestconfig.getoption("--all"):
        whole = {name: {key: value for key, value in call.items() if key != "kernels"} for name, call in more.items()}
        more = whole | MOST_CALLS
    for process in (start(CALLS, ",".join(map(str, CAPABILITIES))), start(more, "90")):  # both run at once
        found += result(process)
    return found


def result(process: "subprocess.Popen[str]") -> list[Any]:
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out)  # type: ignore[no-any-return]


def text(row: Row) -> str:
    return f"{row['kernel']} {row['mode']} of {row['name']} for sm_{row['capability']}: {row}"


def test_every_kernel_is_compiled_for_every_gpu(rows: list[Row]) -> None:
    steps = ("update_kernel", "moments_kernel", "restore_kernel", "update_gradient_kernel", "add_up_kernel")
    kernels = {*MAKES_VOTES, *steps, "em_update_kernel"}
    assert {row["kernel"] for row in rows} == kernels
    for capability in CAPABILITIES:
        assert {row["kernel"] for row in rows if row["capability"] == capability} >= kernels - {"row_norm_kernel"}


def test_votes_are_made_by_tensor_cores(rows: list[Row]) -> None:
    for row in rows:
        if row["kernel"] not in MAKES_VOTES:
            continue
        if row["op"] in ("route_votes", "votes_pass"):
            assert not row["mma"], text(row)
            continue
        operands = {"bfloat16": "bf16.bf16", "float16": "f16.f16"}.get(row["dtype"], "tf32.tf32")
        if row["kernel"] == "gradient_kernel" and row["dtype"] == "float16":
            operands = "tf32.tf32"  # dvotes may be out of the range of float16
        shape = "m16n8k8" if operands.startswith("tf32") else "m16n8k16"
        assert f"mma.sync.aligned.{shape}.row.col.f32.{operands}.f32" in row["mma"], text(row)


def test_positions_are_read_four_at_a_time(rows: list[Row]) -> None:
    """Positions lie side by side in memory, so a load of 16 bytes reads the same component for four positions."""
    for row in rows:
        if row["name"] == "positions" and row["kernel"] == "accumulate_kernel":
            assert not row["narrow_loads"], text(row)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_amd_multiplies_by_matrix_instructions_and_spills_nothing(dtype: str) -> None:
    """Compiles for every GPU of toolchain.AMD; nothing ran on such a GPU."""
    call = {"shape": triton_table.SHAPE, "dtype": dtype, "case": {"coupling": False}, "kernels": LOOPS}
    found = result(start({dtype: call}, "amd"))
    assert {row["gpu"] for row in found} == set(toolchain.AMD)
    for row in found:
        assert row["matrix"] > 0 and row["spilled"] == 0, row


def test_only_small_matrix_instructions(rows: list[Row]) -> None:
    """Instructions of four warps (wgmma, tcgen05) make warps wait for each other and read from shared memory."""
    for row in rows:
        assert all(name.startswith("mma.sync") for name in row["mma"]), text(row)


def test_shared_memory_within_the_device(rows: list[Row]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED, text(row)


def test_multiply_adds_are_asked_for(rows: list[Row]) -> None:
    """If a launch does not set enable_fp_fusion, Triton 3.9 warns, and 3.10 computes products and sums separately."""
    assert all(row["fused"] for row in rows)


def test_no_atomics(rows: list[Row]) -> None:
    for row in rows:
        assert not row["atomics"], text(row)


@pytest.fixture
def layer(rows: list[Row]) -> list[Row]:
    """The rows of the layer in docs/triton-kernels.md. Another release of Triton may give other numbers."""
    if triton_table.release() not in triton_table.split()[1]:
        pytest.skip(f"the table is not of {triton_table.release()}")
    return [row for row in rows if row["name"] in triton_table.BUILDS]


def test_the_table_of_the_docs_is_what_was_compiled(layer: list[Row]) -> None:
    """``python -m tests.support.triton_compile docs`` writes the table."""
    assert triton_table.split()[1] == triton_table.table(layer)


def test_tensor_cores_do_not_sum_over_input_capsules(rows: list[Row]) -> None:
    """Tensor cores round sums towards zero. If allowed, the compiler moves the sum acc + a b into the tensor core."""
    for row in rows:
        if row["mode"] == "uniform" and row["name"] in ("float32", "bfloat16", "tf32"):
            assert row["additions"] >= 80, text(row)  # a warp has 16 rows of 160 columns, in 32 lanes


def test_only_the_first_call_of_a_layer_compiles() -> None:
    first, other_batch = result(start({}, "first-call", "4", "8", "8"))
    assert 0 < first["kernels"] <= 10
    assert first["seconds"] < 120
    assert other_batch["kernels"] == 0


def test_many_iterations_do_not_take_long_to_compile() -> None:
    """The gradient kernel has a loop over iterations, except for the few iterations whose V and ds it keeps."""
    layer = {"shape": [32, 64, 4, 8, 8], "dtype": "float32", "kernels": ["gradient_kernel"]}
    calls = {f"r={r}": {**layer, "case": {"coupling": False, "num_iterations": r}} for r in (5, 6, 48)}
    five, six, many = (row["operations"] for row in result(start(calls, "90")))
    assert many == six > 100
    assert five < 2 * six


def test_a_layer_compiles_few_kernels(rows: list[Row]) -> None:
    """Forward and backward without the coupling: two passes and an update each, and the gradient pass."""
    for name in {row["name"] for row in rows} & {"bfloat16", "tf32", "float16", "shared weight"}:
        kernels = [row["kernel"] for row in rows if row["name"] == name and row["capability"] == 90]
        assert len(kernels) <= 10, kernels


def test_sizes_of_a_batch_are_not_compiled_in() -> None:
    """The numbers of input capsules and positions are not compiled in either."""
    base = {"op": "dynamic_routing", "dtype": "float32"}
    # Triton specialises on whether 16 divides a stride of u, which is an argument. Here 16 divides every stride.
    shapes = [[B, I, 10, 16, 8] for B, I in ((1, 6), (16, 6), (33, 6), (7, 1002), (5, 16))]
    cases: tuple[Row, ...] = ({}, {"softmax": "in", **ALL}, {"logits": "IJ", "mask": True})
    groups = [[{**base, "case": case, "shape": shape} for shape in shapes] for case in cases]
    base = {"op": "votes_pass", "dtype": "float32", "shape": [2, 6, 10, 16, 1]}
    groups.append([{**base, "case": {"query": True, "spatial": size}} for size in ([4, 8], [6, 8], [16, 16])])
    calls = {f"{n} {m}": call for n, group in enumerate(groups) for m, call in enumerate(group)}
    found = iter(result(start(calls, "signatures")))
    for group in groups:
        # Without a split of the batch there is no add_up kernel.
        first, *others = ([kernel for kernel in next(found) if "add_up" not in kernel] for _ in group)
        assert first
        assert all(other == first for other in others), [set(first) ^ set(other) for other in others]
