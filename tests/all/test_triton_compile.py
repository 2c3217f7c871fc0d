"""Every Triton kernel compiled for sm_80, sm_90 and sm_100: tensor cores, registers, shared memory, no atomics, and
what the passes of the canonical layer execute for an input capsule.
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

from ..support import triton_listing, triton_table
from ..support.listing import Code

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
    # Few input capsules: the batch is split.
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
# With --all: what differs little from the above.
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


# The most that a pass may execute for 16 rows and one input capsule, in any build of triton_table.BUILDS: instructions
# of all warps; barriers, changes of layout, accesses to spilled registers, and loads from global memory of fewer than
# 16 bytes of a lane (triton_table.LIMITED). "python -m tests.support.triton_compile docs" prints them as they are now.
MOST = {
    ("float32", "uniform"): (324, 2, 0, 0, 0),
    ("float32", "accumulate"): (496, 2, 0, 0, 0),
    ("float32", "accumulate_gradient"): (681, 2, 1, 0, 0),
    ("float32", "gradient"): (3065, 20, 40, 0, 50),
    ("bfloat16", "uniform"): (151, 2, 0, 0, 0),
    ("bfloat16", "accumulate"): (367, 2, 0, 0, 0),
    ("bfloat16", "accumulate_gradient"): (554, 2, 1, 0, 0),
    ("bfloat16", "gradient"): (2095, 20, 30, 0, 40),
}
# Instructions of a forward and a backward in bfloat16, of those in float32.
HALF = 0.77

# Operations of the gradient kernel in Triton's first representation. One pass of the compiler (tritongpu-coalesce)
# takes a time that grows with their square, for every load and store: at 930 operations it was half of all. Seconds
# depend on what else a machine does.
OPERATIONS = 560


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


# Accesses to spilled registers in a loop: many outputs, second moments, long outputs or K, all options at once, and the
# most iterations of which V and ds are kept.
SPILLS = {
    ("EM", "accumulate_gradient_kernel"): 10,
    ("EM, in", "accumulate_gradient_kernel"): 10,
    ("J=100, logits", "accumulate_gradient_kernel"): 4,
    ("J=1000, backward", "accumulate_gradient_kernel"): 4,
    ("softmax in", "accumulate_gradient_kernel"): 8,
    ("softmax in", "gradient_kernel"): 14,
    ("shared weight", "gradient_kernel"): 12,
    ("D=512", "gradient_kernel"): 14,
    ("r=5", "gradient_kernel"): 24,
}


# The numbers above are those of Triton 3.9.
EARLIER = ("Triton 3.6", "Triton 3.7")


def test_no_register_spills(rows: list[Row]) -> None:
    for row in rows:
        # With registers left, the compiler has spilled a few of its own accord, for one more program at a time. Else
        # an address that few instructions of the loop need.
        of_its_own_accord = 8 if row["registers"] < 255 else 2
        spills = SPILLS.get((row["name"], row["kernel"]))
        if triton_table.release() in EARLIER:
            # Its register allocation spills addresses in more kernels; a tile that is spilled takes hundreds.
            spills, of_its_own_accord = spills or 0, 40
        assert row["spills"] <= max(spills or 0, of_its_own_accord), text(row)
        # Outside of the loops a few addresses.
        assert row["stack"] <= (208 if spills is None else 768), text(row)


def test_shared_memory_within_the_device(rows: list[Row]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED, text(row)


def test_multiply_adds_are_asked_for(rows: list[Row]) -> None:
    """Triton 3.9 warns where a launch leaves it open, 3.10 computes products and sums apart then."""
    assert all(row["fused"] for row in rows)


def test_no_atomics(rows: list[Row]) -> None:
    for row in rows:
        assert not row["atomics"], text(row)


@pytest.fixture
def layer(rows: list[Row]) -> list[Row]:
    """The rows of the layer in docs/triton-kernels.md. Another release of Triton may come to other numbers."""
    if triton_table.release() not in triton_table.split()[1]:
        pytest.skip(f"the table is not of {triton_table.release()}")
    return [row for row in rows if row["name"] in triton_table.BUILDS]


@pytest.mark.parametrize(("dtype", "name"), MOST)
def test_an_input_capsule_takes_few_instructions(dtype: str, name: str, layer: list[Row]) -> None:
    for capability in triton_table.BUILDS[dtype]:
        row = triton_table.passes(layer, dtype, capability)[name]
        found, most = triton_table.limited(row), MOST[dtype, name]
        over = {what: (n, limit) for what, n, limit in zip(triton_table.LIMITED, found, most, strict=True) if n > limit}
        assert not over, f"{over} in {text(row)}"


def test_there_is_little_to_compile(layer: list[Row]) -> None:
    for row in layer:
        if row["kernel"] == "gradient_kernel":
            assert row["operations"] <= OPERATIONS, text(row)


def test_half_the_bytes_take_no_more_instructions(layer: list[Row]) -> None:
    exact, half = (
        triton_table.both_ways(triton_table.passes(layer, dtype, 90), "instructions") for dtype in triton_table.BUILDS
    )
    assert half <= HALF * exact, half / exact


def test_the_table_of_the_docs_is_what_was_compiled(layer: list[Row]) -> None:
    """``python -m tests.support.triton_compile docs`` writes it."""
    assert triton_table.split()[1] == triton_table.table(layer)


def products(row: Row) -> int:
    """Matrix instructions of a program for one input capsule: m16n8k8 of TF32, m16n8k16 of 16-bit numbers."""
    from capsfast.triton import config

    shape, kernel = row["shape"], triton_table.name(row).replace("uniform", "accumulate")
    itemsize, times, back = {"float32": (4, 3, 3), "bfloat16": (2, 1, 2)}[row["dtype"]]
    tiles = config.tiles(kernel, config.Layer(*shape[2:], itemsize), config.TABLE[kernel])
    votes = tiles.NT * (tiles.BB // 16) * (tiles.JT * tiles.DP // 8) * (tiles.KP * itemsize // 32) * times
    # dvotes times W, and transposed times u, both of them over K = 8. Of bfloat16 an instruction sums over 16.
    gradients = tiles.NT * (tiles.BB // 16) * (tiles.JT * tiles.DP // 8) * 2 * back * itemsize // 4
    return votes + (gradients if kernel == "gradient" else 0)


def test_what_is_computed_is_counted(rows: list[Row]) -> None:
    """So that no limit holds because the loop that it is for was not found, and no warp computes what another does."""
    for row in rows:
        if row["kernel"] in MAKES_VOTES:
            assert row["turn"] >= 1 and row["instructions"] > 100, text(row)
        if row["name"] in triton_table.BUILDS and row["kernel"] in MAKES_VOTES:
            assert row["products"] * row["warps"] == products(row), text(row)


def test_tensor_cores_do_not_sum_over_input_capsules(rows: list[Row]) -> None:
    """They round sums towards zero. The compiler makes acc + a b of one product if it may."""
    for row in rows:
        if row["mode"] == "uniform" and row["name"] in ("float32", "bfloat16", "tf32"):
            assert row["additions"] >= 80, text(row)  # a warp has 16 rows of 160 columns, in 32 lanes


# A product over K in two steps, between groups of outputs and the loop over input capsules; only what is looked at.
TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [16, 2], warpsPerCTA = [2, 1], order = [1, 0]}>
#mma = #ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [1, 2], instrShape = [16, 8]}>
    %c0_i32 = arith.constant 0 : i32 loc(#loc1)
    %c1_i32 = arith.constant 1 : i32 loc(#loc1)
    %c2_i32 = arith.constant 2 : i32 loc(#loc1)
    scf.for %group = %c0_i32 to %groups step %c1_i32  : i32 {
      %acc:2 = scf.for %i32 = %lo to %hi step %c1_i32 iter_args(%acc_1 = %cst) -> (tensor<16x32xf32, #mma>)  : i32 {
        %w = ttg.convert_layout %v : tensor<32x8xf32, #blocked> -> tensor<32x8xf32, #linear> loc(#loc3)
        %x:1 = scf.for %k0 = %c0_i32 to %c2_i32 step %c1_i32  : i32 {
          %y = ttg.convert_layout %u : tensor<16x8xf32, #blocked> -> tensor<16x8xf32, #mma> loc(#loc3)
          %z = tt.dot %a, %b, %c : tensor<16x8xf32, #dot> * tensor<8x32xf32, #dot1> -> tensor<16x32xf32, #mma>
        } loc(#loc2)
      } loc(#loc2)
      %after = ttg.convert_layout %v : tensor<32x8xf32, #blocked> -> tensor<32x8xf32, #linear> loc(#loc3)
    } loc(#loc2)
"""
# Of sm_80: loops are left by calls that are branches.
LISTING = """
        /*0000*/                   S2R R3, SR_TID.X ;                          /* 0x0000000000037919 */
        /*0008*/                   IADD3 R3, R3, 0x1, RZ ;                     /* 0x0000000000037919 */
        /*0010*/                   LDGSTS.E.BYPASS.LTC128B.128 [R3], [R2.64] ; /* 0x0000000000037919 */
        /*0020*/                   LDG.E.U16 R8, [R2.64] ;                     /* 0x0000000000037919 */
        /*0030*/                   HMMA.1688.F32.TF32 R4, R60, R8, RZ ;        /* 0x0000000000037919 */
        /*0040*/                   HMMA.1688.F32.TF32 R4, R60, R8, R4 ;        /* 0x0000000000037919 */
        /*0050*/               @P1 BRA 0x30 ;                                  /* 0x0000000000037919 */
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;               /* 0x0000000000037919 */
        /*0070*/              @!P5 CALL.REL.NOINC 0x90 ;                       /* 0x0000000000037919 */
        /*0080*/                   BRA 0x10 ;                                  /* 0x0000000000037919 */
        /*0090*/              @!P6 CALL.REL.NOINC 0xb0 ;                       /* 0x0000000000037919 */
        /*00a0*/                   BRA 0x8 ;                                   /* 0x0000000000037919 */
        /*00b0*/                   EXIT ;                                      /* 0x0000000000037919 */
        /*00c0*/                   BRA 0xc0 ;                                  /* 0x0000000000037919 */
"""


def test_of_a_loop_over_input_capsules_one_is_counted() -> None:
    intermediate = triton_listing.Intermediate(TTGIR)
    group, capsules, steps = intermediate.loops
    assert [loop.trips for loop in intermediate.loops] == [None, None, 2]
    assert intermediate.over_capsules() == capsules and intermediate.within(group) == [capsules, steps]
    # 32 columns are two instructions of each of two warps, in each of the steps.
    assert intermediate.products(capsules) == 4 and intermediate.conversions(capsules) == 3

    code = Code(LISTING)
    turn = triton_listing.turn(code, products=4, trips=[2])
    assert turn is not None and turn.capsules == 1
    assert [turn.count(*kinds) for kinds in (["HMMA"], ["BAR"], [])] == [4, 1, 2 + 2 * 3 + 3]
    assert turn.widths("LDG", "LDGSTS") == {16: 1, 2: 1}
    # Neither a turn with fewer products than one input capsule has, nor one with a part of them.
    assert triton_listing.turn(code, products=5, trips=[2]) is None
    assert triton_listing.turn(code, products=3, trips=[2]) is None


def test_of_a_turn_that_takes_two_input_capsules_half_is_counted() -> None:
    code = Code(LISTING.replace("@P1 BRA 0x30", "@P1 FADD R1, R2, R3"))
    turn = triton_listing.turn(code, products=1, trips=[])
    assert turn is not None and turn.capsules == 2
    assert [turn.count(*kinds) for kinds in (["HMMA"], ["BAR"], [])] == [1, 0.5, 4]
    assert turn.widths("LDG", "LDGSTS") == {16: 0.5, 2: 0.5}


def test_only_the_first_call_of_a_layer_compiles() -> None:
    first, other_batch = result(start({}, "first-call", "4", "8", "8"))
    assert 0 < first["kernels"] <= 10
    assert first["seconds"] < 120
    assert other_batch["kernels"] == 0


def test_many_iterations_do_not_take_long_to_compile() -> None:
    """The kernel that has all iterations in it has them in a loop, but for the few whose V and ds it keeps."""
    layer = {"shape": [32, 64, 4, 8, 8], "dtype": "float32", "kernels": ["gradient_kernel"]}
    calls = {f"r={r}": {**layer, "case": {"coupling": False, "num_iterations": r}} for r in (5, 6, 48)}
    five, six, many = (row["operations"] for row in result(start(calls, "90")))
    assert many == six > 100
    assert five <= 1.2 * OPERATIONS


def test_a_layer_compiles_few_kernels(rows: list[Row]) -> None:
    """Forward and backward without the coupling: two passes and an update each, and the last pass."""
    for name in {row["name"] for row in rows} & {"bfloat16", "tf32", "float16", "shared weight"}:
        kernels = [row["kernel"] for row in rows if row["name"] == name and row["capability"] == 90]
        assert len(kernels) <= 10, kernels


def test_sizes_of_a_batch_are_not_compiled_in() -> None:
    """Nor the number of input capsules or positions."""
    base = {"op": "dynamic_routing", "dtype": "float32"}
    # Of the strides of u, which are arguments, it is known whether 16 divides them. Here it does.
    shapes = [[B, I, 10, 16, 8] for B, I in ((1, 6), (16, 6), (33, 6), (7, 1002), (5, 16))]
    cases: tuple[Row, ...] = ({}, {"softmax": "in", **ALL}, {"logits": "IJ", "mask": True})
    groups = [[{**base, "case": case, "shape": shape} for shape in shapes] for case in cases]
    base = {"op": "votes_pass", "dtype": "float32", "shape": [2, 6, 10, 16, 1]}
    groups.append([{**base, "case": {"query": True, "spatial": size}} for size in ([4, 8], [6, 8], [16, 16])])
    calls = {f"{n} {m}": call for n, group in enumerate(groups) for m, call in enumerate(group)}
    found = iter(result(start(calls, "signatures")))
    for group in groups:
        # Nothing is to be added up where the batch is not split.
        first, *others = ([kernel for kernel in next(found) if "add_up" not in kernel] for _ in group)
        assert first
        assert all(other == first for other in others), [set(first) ^ set(other) for other in others]
