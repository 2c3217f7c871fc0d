"""Every Triton kernel compiled for sm_80, sm_90 and sm_100: tensor cores, registers, shared memory, no atomics."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capsfast
from capsfast import toolchain

if toolchain._why_not_installed():
    pytest.skip(toolchain._why_not_installed(), allow_module_level=True)

Row = dict[str, Any]
CAPABILITIES = (80, 90, 100)
# What a program may have on every GPU from 8.0 on: 99 KiB on 8.6, 8.9 and 12.0, more on the others.
SHARED = 99 * 1024
ALL = {"logits": "BIJ", "mask": True, "out_mask": True, "leaky": True, "bias": True}
# Between two updates of EM routing.
EM = {"precision": True, "center": True, "prior": True, "activation": True, "second": True}
# Layers people train (B and I are not compiled in), one with every option, and both softmaxes.
CALLS: dict[str, Row] = {
    "float32": {"shape": [32, 64, 10, 16, 8], "dtype": "float32"},
    "EM": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "op": "routing_pass", "case": EM},
}
MORE_CALLS: dict[str, Row] = {
    "bfloat16": {"shape": [32, 64, 10, 16, 8], "dtype": "bfloat16", "case": {"coupling": False}},
    "votes": {"shape": [32, 64, 10, 16, 1], "dtype": "float32", "op": "route_votes"},
    "shared weight": {"shape": [32, 64, 4, 64, 64], "dtype": "float32", "case": {"shared": True, "coupling": False}},
    "D=512": {"shape": [16, 16, 2, 512, 8], "dtype": "float32", "case": {"coupling": False}},
    "J=1000": {"shape": [16, 32, 1000, 16, 8], "dtype": "float32"},
    "softmax in": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "case": {"softmax": "in", **ALL}},
    "all options": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "case": {**ALL, "logits": "IJ"}},
    "pose matrices": {
        "shape": [32, 64, 10, 16, 4],
        "dtype": "float32",
        "op": "routing_pass",
        "case": {**EM, "poses": 4},
    },
    "positions": {
        "shape": [2, 64, 10, 16, 1],
        "dtype": "float32",
        "op": "votes_pass",
        "case": {"query": True, "spatial": [16, 16]},
    },
}
# With --exhaustive: what differs from the above in one constant.
MOST_CALLS: dict[str, Row] = {
    "tf32": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "case": {"coupling": False}, "tf32": True},
    "K=64": {"shape": [32, 64, 10, 64, 64], "dtype": "float32", "case": {"coupling": False}},
    "float16": {"shape": [32, 64, 10, 16, 16], "dtype": "float16", "case": {"coupling": False}},
    "r=5": {"shape": [32, 64, 10, 16, 8], "dtype": "float32", "case": {"coupling": False, "num_iterations": 5}},
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
    "J=32": {"shape": [32, 64, 32, 16, 16], "dtype": "float32", "case": {"coupling": False}},
}
MAKES_VOTES = (
    "accumulate_kernel",
    "accumulate_gradient_kernel",
    "gradient_kernel",
    "row_norm_kernel",
    "coupling_kernel",
)


def start(calls: dict[str, Row], what: str) -> "subprocess.Popen[str]":
    root = Path(capsfast.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    listed = [{"op": "dynamic_routing", **call, "name": name} for name, call in calls.items()]
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.support.triton_compile", what],
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
    more = MORE_CALLS | (MOST_CALLS if pytestconfig.getoption("--exhaustive") else {})
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
    kernels = {*MAKES_VOTES, "update_kernel", "moments_kernel", "restore_kernel", "update_gradient_kernel"}
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
        shape = "m16n8k8" if operands.startswith("tf32") else "m16n8k16"
        assert f"mma.sync.aligned.{shape}.row.col.f32.{operands}.f32" in row["mma"], text(row)


def test_positions_are_read_four_at_a_time(rows: list[Row]) -> None:
    """They lie side by side in memory, so that a load of 16 bytes has the same number of four of them."""
    for row in rows:
        if row["name"] == "positions" and row["kernel"] == "accumulate_kernel":
            assert not row["narrow_loads"], text(row)


def test_only_small_matrix_instructions(rows: list[Row]) -> None:
    """Those of four warps together (wgmma, tcgen05) wait for each other and take operands from shared memory."""
    for row in rows:
        assert all(name.startswith("mma.sync") for name in row["mma"]), text(row)


# Accesses to spilled registers in a loop: layers whose K takes two steps, all options at once with softmax "in",
# which carries twice the numbers per pair, and the end of what is served.
SPILLS = {"K=64": 40, "shared weight": 8, "softmax in": 48, "D=512": 400}


def test_no_register_spills(rows: list[Row]) -> None:
    for row in rows:
        # With registers left, the compiler has spilled a few of its own accord, for one more program at a time.
        of_its_own_accord = 8 if row["registers"] < 255 else 0
        assert row["spills"] <= max(SPILLS.get(row["name"], 0), of_its_own_accord), text(row)
        # Outside of the loops a few addresses.
        assert row["stack"] <= (1536 if row["name"] in SPILLS else 96), text(row)


def test_shared_memory_within_the_device(rows: list[Row]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED, text(row)


def test_no_atomics(rows: list[Row]) -> None:
    for row in rows:
        assert not row["atomics"], text(row)


def test_only_the_first_call_of_a_layer_compiles() -> None:
    first, other_batch = result(start({}, "first-call"))
    assert 0 < first["kernels"] <= 10
    assert first["seconds"] < 120
    assert other_batch["kernels"] == 0


def test_a_layer_compiles_few_kernels(rows: list[Row]) -> None:
    """Forward and backward without the coupling: two passes and an update each, and the last pass."""
    for name in {row["name"] for row in rows} & {"bfloat16", "tf32", "float16", "shared weight"}:
        kernels = [row["kernel"] for row in rows if row["name"] == name and row["capability"] == 90]
        assert len(kernels) <= 10, kernels


def test_the_batch_and_the_number_of_input_capsules_are_not_compiled_in() -> None:
    base = {"op": "dynamic_routing", "dtype": "float32"}
    for case in ({}, {"softmax": "in", **ALL}, {"logits": "IJ", "mask": True}):
        shapes = [[B, I, 10, 16, 8] for B, I in ((1, 6), (16, 6), (33, 6), (7, 1002))]
        # Strides that are multiples of 16 are known as such: the same I, or none of them.
        calls = {str(shape): {**base, "case": case, "shape": shape} for shape in shapes}
        first, *others = result(start(calls, "signatures"))
        assert all(other == first for other in others), [set(first) ^ set(other) for other in others]
