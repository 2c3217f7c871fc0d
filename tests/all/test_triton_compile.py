"""Compiles every Triton kernel for sm_80, sm_90 and sm_100: tensor cores, shared memory, no atomics, few kernels."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capsfast
from capsfast.environment import toolchain

from ..support import triton_compile
from ..support.triton_compile import SHAPE, Row

if toolchain._why_not_installed():
    pytest.skip(toolchain._why_not_installed(), allow_module_level=True)

CAPABILITIES = (80, 90, 100)
# Shared memory that every GPU from 8.0 on gives a program: 99 KiB on 8.6, 8.9 and 12.0, more on the others.
SHARED = 99 * 1024
# For sm_90 alone. As many programs as registers allow have their share of 228 KiB.
HOPPER = 227 * 1024
ALL = {"logits": "BIJ", "mask": True, "out_mask": True, "leaky": True, "bias": True}
# The options of a pass between two updates of EM routing.
EM = {"precision": True, "center": True, "prior": True, "activation": True, "second": True}
UPDATE = {"momentum": 0.1, "isotropic": True, "nonlinearity": "softmax"}
PLAIN = {"coupling": False}


def call(op: str, *shape: int, case: Row | None = None, dtype: str = "float32", **more: Any) -> Row:
    """more: as in triton_compile.record."""
    return {"op": op, "shape": shape or SHAPE, "case": case or {}, "dtype": dtype, **more}


def routing(*shape: int, **more: Any) -> Row:
    return call("dynamic_routing", *shape, **more)


OF_EM = ["em_update_kernel", "add_terms_kernel"]


# Layers people train (B and I are not compiled in), one with every option, and both softmaxes.
CALLS: dict[str, Row] = {
    "float32": routing(case=PLAIN),
    "coupling": routing(case={"softmax": "in"}, need=[], kernels=["accumulate_kernel"]),
    "moments": call("routing_pass", case=EM, need=[]),
    "update": call("em_update", 32, 10, 16),
    "routing by EM": call("em_routing", kernels=["gradient_kernel", *OF_EM]),
    # With few input capsules the batch is split.
    "partial dW": routing(128, 1, 10, 16, 8, case=PLAIN, kernels=["add_up_kernel"]),
}
LOOPS = ["accumulate_kernel", "row_norm_kernel", "accumulate_gradient_kernel", "gradient_kernel"]
# For sm_90 alone.
MORE_CALLS: dict[str, Row] = {
    "bfloat16": routing(case=PLAIN, dtype="bfloat16"),
    "float16": routing(32, 64, 10, 16, 16, case=PLAIN, dtype="float16"),
    "tf32": routing(case=PLAIN, tf32=True),
    "K padded": routing(case=PLAIN, smallest_k=16, kernels=LOOPS),
    "one sample": routing(1, 64, 10, 16, 8, case=PLAIN),
    "D=6": routing(32, 64, 10, 6, 8, case=PLAIN, kernels=LOOPS),
    "votes": call("route_votes", 32, 64, 10, 16, 1, kernels=LOOPS),
    "J=100, logits": routing(16, 32, 100, 16, 8, case={"logits": "BIJ"}, kernels=LOOPS),
    "D=512": routing(16, 16, 2, 512, 64, case=PLAIN, kernels=LOOPS),
    "softmax in": routing(case={"softmax": "in", **ALL}, kernels=["gradient_kernel"]),
    "r=6": routing(32, 64, 4, 8, 8, case={**PLAIN, "num_iterations": 6}, kernels=["gradient_kernel"]),
    "r=48": routing(32, 64, 4, 8, 8, case={**PLAIN, "num_iterations": 48}, kernels=["gradient_kernel"]),
    "J=1000": routing(16, 32, 1000, 16, 8),
    "J=1000, EM": call("routing_pass", 16, 32, 1000, 16, 8, case=EM, kernels=LOOPS),
    "D=K=32": routing(32, 64, 10, 32, 32, case=PLAIN, kernels=LOOPS),
    "pose matrices": call("routing_pass", 32, 64, 10, 16, 4, case={**EM, "poses": 4}),
    "positions": call("votes_pass", 2, 64, 10, 16, 1, case={"query": True, "spatial": [16, 16]}),
    "EM, in": call("routing_pass", case={**EM, "query": True, "normalize": "in", "weights": True, "lse": True}),
    "EM, votes": call("votes_pass", 32, 64, 10, 16, 1, case={**EM, "shared": "J", "query": True}, dtype="bfloat16"),
    "largest update": call("em_update", 32, 128, 32, case=UPDATE),
    "EM, masked": call("em_routing", case={"masked": True, "r": 6}, kernels=[*LOOPS, *OF_EM, "inverse_counts_kernel"]),
    "EM, J=32": call("em_routing", 32, 64, 32, 16, 16, dtype="bfloat16", kernels=["gradient_kernel"]),
    "EM, positions": call("em_routing", 2, 64, 10, 16, 1, case={"spatial": [256]}, kernels=[*LOOPS, *OF_EM]),
}
STEPS = (
    "arrange_kernel",
    "update_kernel",
    "restore_kernel",
    "update_gradient_kernel",
    "add_up_kernel",
    "join_row_norms_kernel",
)


def convolution(*shape: int, kernel_size: int = 3, **more: Any) -> Row:
    """shape: of the image."""
    options = {name: more.pop(name) for name in ("stride", "last") if name in more}
    return call("windows", *shape, case={"kernel_size": kernel_size, **options}, **more)


# Kernels outside plans, for sm_90: windows of an image of 8 types, K=16.
WINDOWS: dict[str, Row] = {
    "2-D": convolution(1, 8, 16, 64, 64),
    "bfloat16": convolution(1, 8, 16, 64, 64, dtype="bfloat16"),
    "float64": convolution(1, 8, 16, 64, 64, dtype="float64"),
    "stride": convolution(1, 8, 16, 64, 64, stride=2),
    "last": convolution(1, 8, 16, 64, 64, last=True),
    "1-D": convolution(4, 8, 16, 100),
    "3-D": convolution(1, 8, 16, 32, 32, 32, kernel_size=5),
}


def start(calls: dict[str, Row], what: str) -> "subprocess.Popen[str]":
    root = Path(capsfast.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
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
    process.stdin.write(json.dumps([{**call, "name": name} for name, call in calls.items()]))
    process.stdin.close()
    process.stdin = None
    return process


def result(process: "subprocess.Popen[str]") -> list[Any]:
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors[-3000:]
    return json.loads(out)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """One row per kernel, call and capability."""
    both = (start(CALLS, ",".join(map(str, CAPABILITIES))), start(MORE_CALLS, "90"))
    return [row for process in both for row in result(process)]


def test_every_kernel_is_compiled_for_every_gpu(rows: list[Row]) -> None:
    kernels = {*LOOPS, *STEPS, *OF_EM, "inverse_counts_kernel"}
    assert {row["kernel"] for row in rows} == kernels
    for capability in CAPABILITIES:
        of_sections = {"row_norm_kernel", "join_row_norms_kernel", "inverse_counts_kernel"}
        assert {row["kernel"] for row in rows if row["capability"] == capability} >= kernels - of_sections


def test_votes_are_made_by_tensor_cores(rows: list[Row]) -> None:
    for row in rows:
        given = row["op"] in ("route_votes", "votes_pass") or row["name"] == "EM, positions"
        if row["kernel"] not in LOOPS or given:
            assert not row["mma"], row
            continue
        operands = {"bfloat16": "bf16.bf16", "float16": "f16.f16"}.get(row["dtype"], "tf32.tf32")
        if row["kernel"] == "gradient_kernel" and row["dtype"] == "float16":
            operands = "tf32.tf32"  # dvotes may be out of the range of float16
        shape = "m16n8k8" if operands.startswith("tf32") else "m16n8k16"
        assert f"mma.sync.aligned.{shape}.row.col.f32.{operands}.f32" in row["mma"], row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_amd_multiplies_by_matrix_instructions_and_spills_nothing(dtype: str) -> None:
    """Compiles for every GPU of toolchain.AMD; nothing ran on such a GPU."""
    found = result(start({dtype: routing(case=PLAIN, dtype=dtype, kernels=LOOPS)}, "amd"))
    assert {row["gpu"] for row in found} == set(toolchain.AMD)
    for row in found:
        assert row["matrix"] > 0 and row["spilled"] == 0, row


def test_shared_memory_is_enough_and_sums_have_an_order(rows: list[Row]) -> None:
    """Also: if a launch does not set enable_fp_fusion, Triton 3.9 warns."""
    for row in rows:
        limit = SHARED if row["name"] in CALLS else HOPPER
        assert row["shared"] <= limit and not row["atomics"] and row["fused"], row


def test_large_layers_have_room_in_a_multiprocessor(rows: list[Row]) -> None:
    """Eight warps of loops over input capsules, twelve or more of row_norm; the tiles of large K are loaded ahead."""
    for row in rows:
        if row["name"] == "D=K=32":
            assert row["resident"] * row["warps"] >= 8 and row["stack"] <= 100, row
            assert row["shared"] > 32 * 1024 or row["kernel"] == "gradient_kernel", row
        if row["name"] == "J=1000" and row["kernel"] == "row_norm_kernel":
            assert row["resident"] * row["warps"] >= 12 and row["stack"] == 0, row


def test_no_kernel_touches_memory_before_the_kernel_in_front_has_ended(rows: list[Row]) -> None:
    """See kernels/begin.py. GPUs before 9.0 have no such instructions."""
    for row in rows:
        begin = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"] if row["capability"] >= 90 else []
        assert row["waits"][:-1] == begin and "global" in row["waits"][-1], row
    assert {row["early"] for row in rows if row["capability"] >= 90} == {False, True}


def test_tensor_cores_do_not_sum_over_input_capsules(rows: list[Row]) -> None:
    """Tensor cores round sums towards zero. If allowed, the compiler moves the sum acc + a b into the tensor core."""
    uniform = [row for row in rows if row["mode"] == "uniform" and row["mma"]]
    assert len(uniform) >= 5 and not any(row["sums in products"] for row in uniform)


def test_the_table_of_the_docs_is_what_was_compiled(rows: list[Row]) -> None:
    """``python -m tests.support.triton_compile docs`` writes the table. Another release may give other numbers."""
    if triton_compile.release() not in triton_compile.page()[1]:
        pytest.skip(f"the table is not of {triton_compile.release()}")
    layer = [row for row in rows if row["name"] in triton_compile.BUILDS]
    assert triton_compile.page()[1] == triton_compile.table(layer)


def test_steps_between_passes_have_four_loads_in_flight(rows: list[Row]) -> None:
    """A step waits for one trip to L2 after the other: if the compiler emitted load, add, load, add, for every load."""
    steps = [row for row in rows if row["kernel"] in ("update_kernel", "update_gradient_kernel")]
    steps = [row for row in steps if row["name"] in ("float32", "bfloat16", "one sample")]
    assert {row["warps"] for row in steps} == {1, 4}
    for row in steps:
        assert row["loads in flight"] >= 4, row


def test_loops_load_vectors_by_16_bytes(rows: list[Row]) -> None:
    """V and ds, whatever D is; the other loads are of pairs of numbers."""
    loops = [
        row for row in rows if row["kernel"] == "accumulate_gradient_kernel" and row["name"] in ("bfloat16", "D=6")
    ]
    assert len(loops) == 2
    for row in loops:
        assert row["loads of 4 bytes"] == 0, row


def test_products_of_eight_components_are_not_padded(rows: list[Row]) -> None:
    """Triton 3.6 and 3.7 pad K to 16 if they keep their rule elsewhere than products.py looks: this compiles too."""
    at_once, padded = (
        {row["kernel"]: row["instructions"] for row in rows if row["name"] == name and row["capability"] == 90}
        for name in ("float32", "K padded")
    )
    for kernel in ("accumulate_kernel", "accumulate_gradient_kernel"):
        assert at_once[kernel] + 150 < padded[kernel]


def test_many_iterations_do_not_take_long_to_compile(rows: list[Row]) -> None:
    """The gradient kernel has a loop over iterations, except for the few iterations whose V and ds it keeps."""
    six, many = (next(row["operations"] for row in rows if row["name"] == name) for name in ("r=6", "r=48"))
    assert many == six > 100


def test_a_layer_compiles_few_kernels(rows: list[Row]) -> None:
    """Forward and backward without the coupling: two passes and an update each, and the gradient pass."""
    for name in ("bfloat16", "tf32", "float16"):
        assert len([row for row in rows if row["name"] == name]) <= 10


def test_sizes_of_a_batch_are_not_compiled_in() -> None:
    """The numbers of input capsules and positions are not compiled in either."""
    # Triton specialises on whether 16 divides a stride of u, which is an argument. Here 16 divides every stride.
    # A batch of one strip has programs of its own.
    sizes = ((1, 6), (16, 6), (7, 1002), (5, 16)), ((33, 6), (64, 6), (17, 1002), (128, 16))
    cases: tuple[Row, ...] = ({}, {"softmax": "in", **ALL}, {"logits": "IJ", "mask": True})
    groups = [[routing(B, I, 10, 16, 8, case=case) for B, I in few] for case in cases for few in sizes]
    images = [{"query": True, "spatial": size} for size in ([4, 8], [6, 8], [16, 16])]
    groups.append([call("votes_pass", 2, 6, 10, 16, 1, case=case) for case in images])
    found = iter(result(start({f"{n}": call for n, call in enumerate(itertools.chain(*groups))}, "signatures")))
    for group in groups:
        # Without a split of the batch there is no add_up kernel.
        first, *others = ([kernel for kernel in next(found) if "add_up" not in kernel] for _ in group)
        assert first
        assert all(other == first for other in others), [set(first) ^ set(other) for other in others]


def older() -> bool:
    """Triton 3.6 needs more registers for the windows of float64 images, and orders lanes in another way."""
    return tuple(map(int, triton_compile.release().split()[1].split("."))) < (3, 9)


@pytest.fixture(scope="module")
def of_windows() -> dict[tuple[str, str], Row]:
    """By name of the call and of the kernel."""
    return {(row["name"], row["kernel"]): row for row in result(start(WINDOWS, "90"))}


def test_windows_are_moved_without_spills_and_atomics(of_windows: dict[tuple[str, str], Row]) -> None:
    assert len(of_windows) == 2 * len(WINDOWS)
    for row in of_windows.values():
        assert row["stack"] == 0 and not row["atomics"] and row["fused"] and row["shared"] <= SHARED, row
        # Loads in flight hide the way to memory if there are enough warps.
        assert row["resident"] * row["warps"] >= (12 if older() and row["dtype"] == "float64" else 16), row


def test_windows_are_read_and_written_in_the_order_of_memory(of_windows: dict[tuple[str, str], Row]) -> None:
    """Lanes lie along x of an image (the last axis of its tile), unless components are side by side in memory.
    Windows have 16 bytes for each lane."""
    if older():
        pytest.skip("before Triton 3.9, lanes of fold_kernel lie along the components of an image")
    lanes = {key: row["lanes"] for key, row in of_windows.items()}
    for name in WINDOWS:
        (image,), (windows,) = lanes[name, "unfold_kernel"].values()
        assert image == ([16, 2] if name == "last" else [1, 32]) and windows[1] >= 8, (name, image, windows)
        (windows, image), (stored,) = lanes[name, "fold_kernel"].values()
        assert image == stored == ([32, 1] if name == "last" else [1, 32]) and windows[1] >= 8, (name, image, windows)
        assert "STG.E.128" in of_windows[name, "unfold_kernel"]["accesses"], name
        assert "LDG.E.128" in of_windows[name, "fold_kernel"]["accesses"], name


def test_sizes_of_images_are_not_compiled_in() -> None:
    """Triton specialises on whether 16 divides a stride. The numbers of samples, types, places and windows have one
    kernel."""
    even, odd = ((1, 8, 32, 32), (4, 8, 64, 128), (2, 32, 128, 64)), ((1, 8, 33, 30), (4, 8, 65, 30), (2, 32, 35, 38))
    calls = [convolution(B, types, 16, *size) for B, types, *size in (*even, *odd)]
    found = result(start({f"{n}": call for n, call in enumerate(calls)}, "signatures"))
    for sizes in (found[:3], found[3:]):
        assert len(sizes[0]) == 2 and all(other == sizes[0] for other in sizes), sizes
