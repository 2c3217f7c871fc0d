"""What only the Triton backend has: tiles, TF32, offsets beyond 32 bits, tuned tile sizes, reasons for its absence."""

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import capsfast
from capsfast import backend as choice
from capsfast.calls.arguments import Call, RoutingParameters
from capsfast.environment import toolchain

from .support.accuracy import check, relative_l2
from .support.backends import named
from .support.interpreter import kernels_of
from .support.passes import EVERYTHING, QUADRATIC, WAYS, PassCase, normalized
from .support.problems import PLAIN, AnyCase, Case, Problem, laid_out, make, run

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, dynamic_routing, launch, passes, plan
    from capsfast.triton.config import Choice

TRITON = named("triton")


def problem(shape: tuple[int, ...], case: AnyCase, dtype: torch.dtype = torch.float32) -> Problem:
    return make(shape, case, dtype=dtype)


def errors(problem: Problem, backend: str = "triton") -> dict[str, float]:
    truth = run(problem.to(torch.float64), "reference")
    return {name: relative_l2(value.double(), truth[name]) for name, value in run(problem, backend).items()}


def as_exact_as_einsum(problem: Problem) -> None:
    plain = errors(problem, "reference")
    for name, error in errors(problem).items():
        assert error < 2 * plain[name] + 10 * torch.finfo(problem.dtype).eps, name


def exact(problem: Problem) -> None:
    assert all(error < 2e-5 for error in errors(problem).values()), errors(problem)


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Changes a constant of the backend, and drops the plans that were made with it."""

    def set_to(module: Any, name: str, value: Any) -> None:
        monkeypatch.setitem(module, name, value) if isinstance(module, dict) else monkeypatch.setattr(
            module, name, value
        )
        plan.forget()

    yield set_to
    plan.forget()


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes products in the interpreter as inexact as in tensor cores: operands keep 10 bits after the leading bit,
    sums are float32, rounded towards zero."""
    from triton.runtime import interpreter

    plain = interpreter.interpreter_builder.create_dot

    def rounded(handle: Any) -> Any:
        data = handle.data
        if data.dtype == np.float32:
            data = (data.view(np.int32) & np.int32(-8192)).view(np.float32)
        return interpreter.TensorHandle(data, handle.dtype)

    def create_dot(a: Any, b: Any, acc: Any, *rest: Any) -> Any:
        if a.data.dtype != np.float32:
            return plain(a, b, acc, *rest)
        a, b = rounded(a), rounded(b)
        exact = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + acc.data
        nearest = exact.astype(np.float32)
        cut = np.where(np.abs(nearest) > np.abs(exact), np.nextafter(nearest, np.float32(0)), nearest)
        return interpreter.TensorHandle(cut.astype(np.float32), acc.dtype.scalar)

    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", create_dot)


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


# With many input capsules a sum that is rounded towards zero drifts.
@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ((17, 9, 3, 16, 8), PLAIN),
        ((17, 9, 3, 16, 8), QUADRATIC),
        pytest.param((1, 250, 2, 4, 3), Case(coupling=False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_three_tf32_products_are_as_exact_as_float32(tensor_cores: None, shape: tuple[int, ...], case: AnyCase) -> None:
    as_exact_as_einsum(problem(shape, case))


def test_one_tf32_product_only_where_torch_is_told_so(tensor_cores: None, tf32_allowed: None) -> None:
    found = errors(problem((17, 9, 3, 16, 8), PLAIN))
    for name in ("v", "du", "dweight"):
        assert 1e-5 < found[name] < 1e-2, (name, found[name])


def test_one_tf32_product_rounds_to_the_nearest(tensor_cores: None, tf32_allowed: None) -> None:
    """Truncated operands would make all votes smaller, by a factor of 1 - 7e-4. A NaN of a GPU stays a NaN."""
    given = problem((17, 9, 3, 16, 8), Case(num_iterations=1, squash="identity"))
    for value in given.inputs.values():
        value.uniform_(0.5, 1.0)
    got, truth = run(given, "triton")["v"].double(), run(given.to(torch.float64), "reference")["v"]
    assert abs((got / truth - 1).mean()) < 5e-5
    given.inputs["u"][0] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)  # all bits but the sign
    assert not run(given, "triton")["v"][0].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_for_amd(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD GPUs kernels multiply float32 operands without splitting them."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    as_exact_as_einsum(problem((3, 4, 5, 6, 2), PLAIN, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [Case(softmax="in", logits="BIJ", coupling=False), PassCase(query=True, logits="BIJ", normalize="in")],
    ids=str,
)
def test_a_large_coupling_does_not_take_digits_from_the_others(case: AnyCase) -> None:
    """Softmax over the input capsules: kernels form dc - sum_i c dc from votes minus s, not from two large numbers."""
    given = problem((17, 64, 6, 16, 8), case)
    given.inputs["logits"] *= 20
    assert errors(given)["dlogits"] < 1.5e-6


@pytest.mark.parametrize("how", WAYS)
def test_rows_of_no_sample_have_no_part_in_sums_over_samples(how: str) -> None:
    """Eleven of the 16 rows of a tile have no sample. With a center their votes are not 0."""
    exact(problem((5, 3, 4, 16, 8), PassCase(query=True, precision=True, center=True, logits="IJ", normalize=how)))


def test_rows_of_no_sample_do_not_overflow() -> None:
    """Minus the center, votes of rows without a sample are large, and votes of samples are small."""
    given = problem((5, 3, 4, 8, 8), PassCase(query=True, center=True, normalize="in"))
    u, weight = given.inputs["u"].mul_(0.05).add_(1), given.inputs["weight"].mul_(0.05).add_(0.6)
    given.inputs["center"] = torch.einsum("bik,ijdk->bijd", u, weight).mean(1)
    given.inputs["query"].fill_(-3)
    exact(given)


@pytest.mark.parametrize("how", ["out", "sigmoid"])
def test_tiles_outside_have_no_part_in_sums_over_outputs(how: str) -> None:
    """The last group has tiles without any output. These tiles read V and the center of other outputs."""
    for kernel in ("accumulate", "accumulate_gradient"):
        cut = config.tiles(kernel, config.LayerSizes(46, 16, 8, 4), config.TABLE[f"{kernel} quadratic"])
        assert cut.sections * cut.NT * cut.JT > 46 and 46 % cut.JT == 0
    exact(problem((3, 2, 46, 16, 8), PassCase(query=True, center=True, activation=True, normalize=how)))


@pytest.mark.slow
def test_tiles_outside_do_not_overflow() -> None:
    """Tiles without any output would have logits of 0; the others have -100, and 1 / exp(-100) overflows float32."""
    given = problem((2, 3, 56, 32, 4), Case(logits="IJ"))
    given.inputs["logits"].fill_(-100)
    exact(given)


def test_votes_of_the_positions_of_one_sample() -> None:
    """With one sample the sums are a view of a tensor that has positions as its last axis."""
    case = PassCase(query=True, normalize="in", leaky=True, weights=True, spatial=(3,))
    exact(problem((1, 3, 4, 2, 1), case))


def test_no_input_capsules_and_k_in_steps() -> None:
    given = problem((2, 0, 3, 4, 70), Case(shared=True, bias=True))
    got = run(given, "triton")
    assert not got["dweight"].any()
    torch.testing.assert_close(got["v"], capsfast.squash(given.inputs["bias"]).expand(2, -1, -1))


def test_an_empty_log_sum_is_float32_whatever_the_default() -> None:
    u, weight, query = torch.rand(2, 3, 4), torch.rand(3, 0, 4, 4), torch.rand(2, 0, 4)
    torch.set_default_dtype(torch.float64)
    try:
        found = capsfast.routing_pass(u, weight, query=query, return_lse=True, backend="triton")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.lse is not None and found.lse.dtype == torch.float32


@pytest.mark.rows(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(num_iterations=2, bias=True),
        Case(num_iterations=4, shared=True),
        Case(softmax="in", poses=2),
        Case(gradient="last"),
        Case(logits="BIJ", mask=True, out_mask=True, leaky=True),
    ],
    ids=str,
)
def test_what_the_gradient_keeps_in_registers(case: Case, dtype: torch.dtype, change: Callable[..., None]) -> None:
    """Registers keep V and ds of all iterations or of none, for one tile of outputs or for all outputs."""
    for held in (0, 1000):
        for columns in (16, 160):
            change(passes, "MOST_HELD", held)
            change(config.TABLE, "gradient", config.TABLE["gradient"]._replace(columns=columns))
            # Seed 0 has a sample that turns an ulp of the inputs into an error of 2e-5 in du after four iterations,
            # five times what the nudged inputs of check() happen to show.
            check(make((17, 3, 11, 8, 4), case, dtype=dtype, seed=8), TRITON)


def test_votes_of_one_input_capsule_for_more_samples_than_run_at_once() -> None:
    check(make((65, 1, 2, 4, 1), op="route_votes", dtype=torch.float32), TRITON)


def test_rows_that_pad_a_pose_may_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """dW is a sum over rows. A last tile that is not full must not read such rows, not even times 0."""
    new = torch.empty_strided

    def nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = new(*args, **kwargs)
        return tensor.fill_(255 if tensor.dtype == torch.uint8 else torch.nan)

    monkeypatch.setattr(torch, "empty_strided", nan)
    check(make((5, 2, 3, 6, 4), Case(num_iterations=2, poses=3), dtype=torch.float32), TRITON)


# Pose matrices, votes with positions, and votes that outputs share: their gradient is a sum over outputs.
@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ((2, 2, 6, 12, 2), replace(EVERYTHING, poses=2)),
        ((2, 2, 6, 4, 1), replace(EVERYTHING, spatial=(5,))),
        ((2, 2, 6, 3, 1), PassCase(query=True, second=True, shared="J")),
    ],
    ids=str,
)
def test_more_outputs_than_a_program_holds(
    shape: tuple[int, ...], case: PassCase, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in config.TABLE:
        change(config.TABLE, name, Choice(16, 1, chunk=1))
    given = problem(shape, case)
    launched = kernels_of(lambda: check(given, TRITON), monkeypatch)
    assert {"row_norm_kernel", "join_row_norms_kernel"} <= {name for name, _ in launched}


@pytest.mark.parametrize("case", [EVERYTHING, replace(EVERYTHING, leaky=False, lse=False)], ids=str)
@pytest.mark.parametrize("op", ["routing_pass", "votes_pass"])
def test_a_softmax_joins_sections_of_outputs(op: str, case: PassCase, change: Callable[..., None]) -> None:
    """The maxima of sections differ. Masked: a section, all sections, or all but the one with the smallest logits."""
    for name in config.TABLE:
        change(config.TABLE, name, Choice(16, 1, chunk=1))
    given = make((5, 2, 12, 4, 8), case, op, torch.float32)
    layer = config.LayerSizes(12, 4, 0 if op == "votes_pass" else 8, 4)
    assert config.tiles("row_norm", layer, config.TABLE["row_norm"]).sections == 3
    given.inputs["logits"][:, :, :4] -= 200.0
    given.inputs["logits"][:, :, 4:8] += 20.0
    given.masks["out_mask"][:] = torch.ones(5, 12, dtype=torch.bool)
    given.masks["out_mask"][1, 4:8] = False
    given.masks["out_mask"][2] = False
    given.masks["out_mask"][3, 4:] = False
    check(given, TRITON)


def test_a_softmax_of_more_sections_than_are_joined_at_once(change: Callable[..., None]) -> None:
    for name in config.TABLE:
        change(config.TABLE, name, Choice(16, 1, chunk=1))
    assert config.tiles("row_norm", config.LayerSizes(140, 4, 4, 4), config.TABLE["row_norm"]).sections > 32
    check(problem((2, 2, 140, 4, 4), Case(logits="IJ", leaky=True)), TRITON)


@pytest.mark.parametrize(
    ("I", "K", "together"), [(6, 8, 2), (8, 4, 4), (10, 3, 5), (7, 8, 1), (6, 16, 1)], ids=lambda each: str(each)
)
@pytest.mark.parametrize("case", [PLAIN, Case(softmax="in", out_mask=True), Case(shared=True)], ids=str)
def test_a_uniform_pass_takes_input_capsules_together(
    case: Case, I: int, K: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = problem((17, I, 3, 8, K), case)
    launched = kernels_of(lambda: check(given, TRITON), monkeypatch)
    passes = [kwargs for name, kwargs in launched if name == "accumulate_kernel"]
    assert [part["TOGETHER"] for part in passes if part["MODE"] == "uniform"] == [together]
    # The components of a sliced u do not lie side by side.
    check(laid_out(given, "sliced"), TRITON)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["out", "in"])
@pytest.mark.parametrize("op", ["dynamic_routing", "routing_pass"])
def test_more_splits_than_are_added_up_at_once(op: str, how: str, change: Callable[..., None]) -> None:
    """As on a GPU. The three splits of the interpreter would be added up in one step."""
    routed = Case(softmax=how, logits="BIJ", leaky=True)
    given = problem((2, 20, 3, 6, 2), routed if op == "dynamic_routing" else normalized(EVERYTHING, how))
    before = run(given, "triton")
    change(launch, "INTERPRETED", 20)
    found = check(given, TRITON)
    assert any(not torch.equal(value, before[name]) for name, value in found.items()), "sums have the same parts"


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ((33, 2, 3, 4, 2), Case(bias=True, logits="IJ")),
        ((33, 2, 3, 4, 2), Case(softmax="in", logits="BIJ", mask=True, out_mask=True)),
        ((3, 2, 3, 4, 1), Case(spatial=(3,), mask=True)),
    ],
    ids=str,
)
def test_a_backward_in_parts_of_the_batch(
    shape: tuple[int, ...], case: Case, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is taken in parts if coefficients of all samples would take more than half the size of the votes."""
    given = problem(shape, case)
    whole = kernels_of(lambda: run(given, "triton"), monkeypatch)
    change(dynamic_routing, "MOST_COEFFICIENTS", 0)
    assert len(kernels_of(lambda: exact(given), monkeypatch)) > len(whole)


@pytest.mark.rows(1)
@pytest.mark.parametrize("common", [False, True], ids=["u", "votes of all outputs"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_over_sections_of_outputs_are_rounded_once(dtype: torch.dtype, common: bool) -> None:
    """Half of the outputs add to a gradient what the other half subtracts, so only rounding remains."""
    B, I, J, D = 3, 2, 400, 3
    half = (torch.rand(1, J // 2, D) + 1).expand(B, -1, -1)
    weight = (torch.rand(I, J // 2, D, 4) / 4).repeat(1, 2, 1, 1).to(dtype)
    x = torch.rand((B, I, 1, D) if common else (B, I, 4)).to(dtype).requires_grad_()

    def gradient(dv: torch.Tensor) -> float:
        if common:
            v = capsfast.route_votes(x, bias=torch.zeros(J, D, dtype=dtype), num_iterations=1, backend="triton")
        else:
            v = capsfast.dynamic_routing(x, weight, num_iterations=1, backend="triton")
        return float(torch.autograd.grad(v, x, dv.to(dtype))[0].abs().max())

    assert gradient(torch.cat([half, -half], 1)) < 1e-5 * gradient(torch.cat([half, 0 * half], 1))


FAR = 2**31 + 16


# Input capsules may lie 2**31 numbers apart, samples only if they have positions; output capsules may not.
@pytest.mark.parametrize(
    ("case", "name", "axis", "refused"),
    [
        (Case(coupling=False), "u", 1, ""),
        (Case(coupling=False), "u", 0, r"'triton' cannot serve .* less than 2\*\*31 .*; pass contiguous"),
        (Case(coupling=False), "weight", 1, "the weight would reach"),
        (normalized(EVERYTHING, "in"), "u", 1, ""),
        (replace(EVERYTHING, spatial=(3,)), "votes", 0, ""),
        (replace(EVERYTHING, spatial=(3,)), "votes", 2, "u or votes would reach"),
        (Case(coupling=False, spatial=(3,)), "votes", 1, ""),
    ],
    ids=str,
)
def test_what_lies_beyond_32_bits(case: AnyCase, name: str, axis: int, refused: str) -> None:
    given = problem((2, 2, 2, 4, 1), case)
    wanted, value = run(given, "triton"), given.inputs[name]
    stride = (*value.stride()[:axis], FAR, *value.stride()[axis + 1 :])
    reach = 1 + sum((n - 1) * step for n, step in zip(value.shape, stride, strict=True))
    room = torch.from_numpy(np.empty(reach, np.float32))  # memory between the values is never touched
    given.inputs[name] = room.as_strided(value.shape, stride).copy_(value)
    if refused:
        with pytest.raises(RuntimeError, match=refused):
            run(given, "triton")
        return
    # Not bitwise: strides decide whether a uniform pass takes input capsules together.
    torch.testing.assert_close(run(given, "triton"), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_users_interpret_16_bits(
    dtype: torch.dtype, change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Works without the repairs of tests/support/interpreter.py: no product in the interpreter gets 16-bit operands."""
    from triton.runtime import interpreter

    dot = interpreter.interpreter_builder.create_dot

    def wide(a: Any, b: Any, *rest: Any) -> Any:
        assert a.data.dtype == b.data.dtype == np.float32
        return dot(a, b, *rest)

    change(launch, "WIDENED", True)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", wide)
    check(problem((3, 3, 3, 8, 4), Case(logits="BIJ"), dtype), TRITON)


def test_absence_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = capsfast.backends()["triton"]
    assert not state.available and "there is no CUDA device" in state.reason and state.devices == ("cuda",)
    monkeypatch.setattr(toolchain, "_why_not_installed", lambda: "the package triton is not installed")
    assert capsfast.backends()["triton"].reason == "the package triton is not installed"


@pytest.mark.parametrize(
    ("triton", "numpy", "fits"), [("3.6.0", "2.4.6", False), ("3.6.0", "2.3.5", True), ("3.7.1", "2.5", True)]
)
def test_the_interpreter_and_numpy(triton: str, numpy: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"triton": triton, "numpy": numpy}.__getitem__)
    found = toolchain._why_not_interpreted.__wrapped__()
    assert found == ("" if fits else f"the interpreter of Triton {triton} needs NumPy below 2.4, this is {numpy}")


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    same = {"dtype": torch.float32, "shape": (2, 3, 6), "dim": lambda: 3, "stride": lambda axis: 18}
    u: Any = SimpleNamespace(device=torch.device("cuda", 93), **same)
    call = Call("capsfast.dynamic_routing", u, torch.empty(3, 4, 5, 6), RoutingParameters(), None, 4, 5)
    with pytest.raises(RuntimeError, match=r"'triton' cannot serve .* capability 8\.0 or newer, .* has 7\.5"):
        choice.choose(call, "triton")
    monkeypatch.setattr(choice, "_warned", False)
    with pytest.warns(RuntimeWarning, match=r"slow reference backend: .* capability 8\.0 or newer"):
        assert choice.choose(call, None) == "reference"


@pytest.mark.parametrize(
    ("name", "why"), [("gfx942:sramecc+:xnack-", ""), ("gfx1100", "it needs an AMD GPU of gfx90a")]
)
def test_amd_gpus(name: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName=name))
    found = toolchain._too_old.__wrapped__(torch.device("cuda", 0))
    assert found.startswith(why) and bool(found) == bool(why)


def test_too_large_capsules_are_refused() -> None:
    votes = torch.zeros(1, 1, 1, 513)
    with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: .* D up to 512, got 513"):
        capsfast.route_votes(votes, backend="triton")
    capsfast.route_votes(votes)
    u, weight = torch.zeros(1, 1, 33, 1), torch.zeros(1, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: .* up to 32 rows, got 33"):
        capsfast.dynamic_routing(u, weight, backend="triton")
