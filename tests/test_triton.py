"""What only the Triton backend has: tiles, TF32, offsets beyond 32 bits, tuned tile sizes, reasons for its absence."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import capsfast
from capsfast import backend as choice
from capsfast import toolchain
from capsfast.arguments import Call, RoutingParameters

from .support import passes as support_passes
from .support.accuracy import relative_l2
from .support.backends import recorded_ops
from .support.interpreter import kernels_of
from .support.passes import EVERYTHING, LINEAR, QUADRATIC, WAYS, PassCase, normalized
from .support.problems import PLAIN, Case, make, run

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, launch, passes, plan, routing
    from capsfast.triton.config import Choice
    from capsfast.triton.kernels.accumulate import accumulate_gradient_kernel


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


def errors(problem: Any, backend: str) -> dict[str, float]:
    truth = run(problem.to(torch.float64), "reference")
    return {name: relative_l2(value.double(), truth[name]) for name, value in run(problem, backend).items()}


def test_three_tf32_products_are_as_exact_as_float32(tensor_cores: None) -> None:
    problem = make((17, 9, 3, 16, 8), PLAIN, dtype=torch.float32)
    plain = errors(problem, "reference")
    for name, error in errors(problem, "triton").items():
        assert error < 2 * plain[name] + 5e-7, name


def test_a_pass_is_as_exact_as_float32(tensor_cores: None) -> None:
    problem = support_passes.make((17, 9, 3, 16, 8), QUADRATIC, dtype=torch.float32)
    plain = errors(problem, "reference")
    for name, error in errors(problem, "triton").items():
        assert error < 2 * plain[name] + 1e-6, name


@pytest.mark.parametrize("how", WAYS)
def test_rows_of_no_sample_have_no_part_in_sums_over_samples(how: str) -> None:
    """Eleven of the 16 rows of a tile have no sample. With a center their votes are not 0."""
    case = PassCase(query=True, precision=True, center=True, logits="IJ", second=True, normalize=how)
    problem = support_passes.make((5, 3, 4, 16, 8), case, dtype=torch.float32)
    for name, error in errors(problem, "triton").items():
        assert error < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("I", [250, 1200])
def test_sums_over_many_input_capsules_do_not_drift(tensor_cores: None, I: int) -> None:
    problem = make((1, I, 2, 4, 3), Case(coupling=False), dtype=torch.float32)
    plain = errors(problem, "reference")
    for name, error in errors(problem, "triton").items():
        assert error < 2 * plain[name] + 5e-7, name


@pytest.mark.slow
def test_a_large_coupling_does_not_take_digits_from_the_others() -> None:
    """Softmax over the input capsules: kernels form dc - sum_i c dc from votes minus s, not from two large numbers."""
    problem = make((17, 64, 6, 16, 8), Case(softmax="in", logits="BIJ", coupling=False), dtype=torch.float32)
    problem.inputs["logits"] *= 20
    assert errors(problem, "triton")["dlogits"] < 1.5e-6


def terms(problem: Any) -> dict[str, torch.Tensor]:
    """The size of the terms whose differences are gradients of a pass: c dc, with its terms added up without signs."""
    given, of = problem.inputs, {name: value.abs() for name, value in problem.gradients.items()}
    x = torch.einsum("bik,ijdk->bijd", given["u"], given["weight"]).abs()
    dc = of["mass"][:, None] + torch.einsum("bijd,bjd->bij", x, of["first"])
    if problem.case.second:
        dc += torch.einsum("bijd,bjd->bij", x * x, of["second"]) + of["weights"]
    c = run(replace(problem, case=replace(problem.case, weights=True)), "reference", need=[])["weights"]
    total = {"dlogits": c * dc, "dquery": torch.einsum("bij,bijd->bjd", c * dc, x)}
    return total | {"dprecision": torch.einsum("bij,bijd->bjd", c * dc, x * x) / 2}


@pytest.mark.rows(1)
@pytest.mark.parametrize("second", [False, True])
def test_a_saturated_softmax_over_the_input_capsules_in_a_pass(second: bool) -> None:
    """Where one coupling is nearly 1, the gradients of all logits nearly vanish. They are differences of larger
    numbers, and as exact as those numbers. exp() also turns the rounding of a logit into a relative error.

    The error of einsum is not a fair bound here: by luck its sum over i may round to the one dc that counts.
    """
    case = PassCase(query=True, logits="BIJ", normalize="in", weights=second, second=second, precision=second)
    problem = support_passes.make((4, 24, 5, 8, 4), case, dtype=torch.float32)
    problem.inputs["logits"] *= 300
    wide, eps = problem.to(torch.float64), torch.finfo(torch.float32).eps
    truth, found, sizes = run(wide, "reference"), run(problem, "triton"), terms(wide)
    relative = 4 * wide.inputs["logits"].abs().max()
    for name in sizes.keys() & found.keys():
        error = (found[name].double() - truth[name]).abs().max()
        assert error < eps * (2 * sizes[name].max() + relative * truth[name].abs().max()), name


def gradients(function: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Compares gradients of the Triton kernels with float64."""
    found = []
    for backend, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        leaves = [value.to(dtype).requires_grad_() for value in inputs]
        output = function(*leaves, backend=backend)
        found.append(torch.autograd.grad(output.square().sum(), leaves))
    for truth, value in zip(*found, strict=True):
        assert relative_l2(value.double(), truth) < 1e-4


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "case",
    [
        Case(num_iterations=2, bias=True),
        Case(logits="BIJ", mask=True, out_mask=True, leaky=True),
        Case(num_iterations=4, shared=True),
        Case(softmax="in", poses=2),
        Case(gradient="last"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_gradient_keeps_in_registers(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers keep V and ds of all iterations or of none, for one tile of outputs or for all outputs."""
    problem, eps = make((17, 3, 11, 8, 4), case, dtype=dtype), torch.finfo(dtype).eps
    wanted, ways = run(problem, "triton"), set()
    for held, columns in ((0, 16), (0, 160), (1000, 160), (1000, 16)):
        monkeypatch.setattr(passes, "MOST_HELD", held)
        monkeypatch.setitem(config.TABLE, "gradient", config.TABLE["gradient"]._replace(columns=columns))
        plan.forget()
        found: dict[str, torch.Tensor] = {}
        launched = dict(kernels_of(lambda into=found: into.update(run(problem, "triton")), monkeypatch))[
            "gradient_kernel"
        ]
        ways.add((launched["HELD"], launched["NT"] * launched["JT"] < 11))
        for name, value in found.items():
            assert relative_l2(value.double(), wanted[name].double()) < 16 * eps, (name, held, columns)
    plan.forget()
    assert len(ways) == 4


@pytest.mark.rows(1)
@pytest.mark.parametrize("common", [False, True], ids=["u", "votes of all outputs"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_over_groups_of_outputs_are_rounded_once(dtype: torch.dtype, common: bool) -> None:
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


@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("dynamic_routing", Case(bias=True, logits="IJ")),
        ("dynamic_routing", Case(softmax="in", logits="BIJ", mask=True, out_mask=True)),
        ("route_votes", Case(spatial=(3,), mask=True)),
    ],
    ids=str,
)
def test_a_backward_in_parts_of_the_batch(op: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is taken in parts if coefficients of all samples would take more than half the size of the votes."""
    problem = make((33, 2, 3, 4, 2) if op == "dynamic_routing" else (3, 2, 3, 4, 1), case, op, torch.float32)
    wanted, whole = run(problem.to(torch.float64), "reference"), launches(problem, monkeypatch)
    monkeypatch.setattr(routing, "MOST_COEFFICIENTS", 0)
    plan.forget()
    found: dict[str, torch.Tensor] = {}
    parts = kernels_of(lambda: found.update(run(problem, "triton")), monkeypatch)
    plan.forget()
    assert len(parts) > len(whole)
    for name, value in found.items():
        torch.testing.assert_close(value.double(), wanted[name].double(), rtol=1e-4, atol=1e-5)


def test_votes_of_the_positions_of_one_sample() -> None:
    """With one sample the sums are a view of a tensor that has positions as its last axis."""

    def moments(votes: torch.Tensor, query: torch.Tensor, backend: str) -> torch.Tensor:
        found = capsfast.votes_pass(
            votes, query=query, normalize="in", leaky=True, return_weights=True, backend=backend
        )
        return torch.cat([found.first.flatten(), found.mass.flatten(), found.weights.flatten()])

    gradients(moments, [torch.randn(1, 3, 4, 2, 3), torch.randn(1, 4, 2, 3)])


def test_an_empty_log_sum_is_float32_whatever_the_default() -> None:
    u, weight, query = torch.rand(2, 3, 4), torch.rand(3, 0, 4, 4), torch.rand(2, 0, 4)
    torch.set_default_dtype(torch.float64)
    try:
        found = capsfast.routing_pass(u, weight, query=query, return_lse=True, backend="triton")
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.lse is not None and found.lse.dtype == torch.float32


@pytest.mark.parametrize("how", ["out", "sigmoid"])
def test_tiles_outside_have_no_part_in_sums_over_outputs(how: str) -> None:
    """The last group has tiles without any output. These tiles read V and the center of other outputs."""
    J, D = 46, 16
    query, center = torch.randn(2, 3, J, D) * 0.3

    def first(*inputs: torch.Tensor, backend: str) -> torch.Tensor:
        names = ("u", "weight", "query", "center", "activation")
        return capsfast.routing_pass(**dict(zip(names, inputs, strict=True)), normalize=how, backend=backend).first

    u, weight = torch.randn(3, 2, 8), torch.randn(2, J, D, 8) * 0.2
    for kernel in ("accumulate", "accumulate_gradient"):
        cut = config.tiles(kernel, config.Layer(J, D, 8, 4), config.TABLE[f"{kernel} quadratic"])
        assert cut.groups * cut.NT * cut.JT > J and J % cut.JT == 0
    gradients(first, [u, weight, query, center, torch.rand(3, 2)])


@pytest.mark.slow
def test_tiles_outside_do_not_overflow() -> None:
    """Tiles without any output would have logits of 0; the others have -100, and 1 / exp(-100) overflows float32."""

    def routed(u: torch.Tensor, weight: torch.Tensor, backend: str) -> torch.Tensor:
        logits = torch.full((3, 56), -100.0, dtype=u.dtype)
        return capsfast.dynamic_routing(u, weight, logits=logits, backend=backend)

    gradients(routed, [torch.randn(2, 3, 4), torch.randn(3, 56, 32, 4) * 0.2])


def test_rows_of_no_sample_do_not_overflow() -> None:
    """Minus the center, votes of rows without a sample are large, and votes of samples are small."""
    u, weight = torch.randn(5, 3, 8) * 0.05 + 1, torch.randn(3, 4, 8, 8) * 0.05 + 0.6
    center = torch.einsum("bik,ijdk->bijd", u, weight).mean(1)

    def first(u: torch.Tensor, weight: torch.Tensor, query: torch.Tensor, backend: str) -> torch.Tensor:
        about = center.to(u)
        return capsfast.routing_pass(u, weight, query=query, center=about, normalize="in", backend=backend).first

    gradients(first, [u, weight, torch.full((5, 4, 8), -3.0)])


def test_no_input_capsules_and_k_in_steps() -> None:
    problem = make((2, 0, 3, 4, 70), Case(shared=True, bias=True), dtype=torch.float32)
    got = run(problem, "triton")
    assert not got["dweight"].any()
    torch.testing.assert_close(got["v"], capsfast.squash(problem.inputs["bias"]).expand(2, -1, -1))


@pytest.fixture
def tf32_allowed() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_one_tf32_product_only_where_torch_is_told_so(tensor_cores: None, tf32_allowed: None) -> None:
    problem = make((17, 9, 3, 16, 8), PLAIN, dtype=torch.float32)
    found = errors(problem, "triton")
    for name in ("v", "du", "dweight"):
        assert 1e-5 < found[name] < 1e-2, (name, found[name])


def far_apart(size: tuple[int, ...], stride: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    """The values in a tensor of these strides; memory between them is never touched."""
    reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    room = torch.from_numpy(np.empty(reach, np.float32))
    return room.as_strided(size, stride).copy_(values)


FAR = 2**31 + 16


@pytest.mark.parametrize(("op", "name"), [("dynamic_routing", "u"), ("route_votes", "votes"), ("routing_pass", "u")])
def test_input_capsules_beyond_32_bits(op: str, name: str) -> None:
    """Input capsules may lie 2**31 numbers apart, samples may not."""
    if op == "routing_pass":
        problem = support_passes.make((2, 2, 2, 4, 3), normalized(EVERYTHING, "in"), op, torch.float32)
    else:
        problem = make((2, 2, 2, 4, 3), Case(coupling=False), op, torch.float32)
    wanted, values = run(problem, "triton"), problem.inputs[name]
    problem.inputs[name] = far_apart(values.shape, (values.stride(0), FAR, *values.stride()[2:]), values)
    for key, value in run(problem, "triton").items():
        assert torch.equal(value, wanted[key]), key
    problem.inputs[name] = far_apart(values.shape, (FAR, *values.stride()[1:]), values)
    with pytest.raises(RuntimeError, match=r"'triton' serves tensors that reach less than 2\*\*31 .*; pass contiguous"):
        run(problem, "triton")


@pytest.mark.parametrize("axis", [0, 2])
def test_positions_beyond_32_bits(axis: int) -> None:
    """Samples with positions may lie 2**31 numbers apart, output capsules may not."""
    case = replace(EVERYTHING, spatial=(3,))
    problem = support_passes.make((2, 2, 2, 3, 1), case, "votes_pass", torch.float32)
    wanted, votes = run(problem, "triton"), problem.inputs["votes"]
    problem.inputs["votes"] = far_apart(votes.shape, (*votes.stride()[:axis], FAR, *votes.stride()[axis + 1 :]), votes)
    if axis == 2:
        with pytest.raises(RuntimeError, match="u or votes would reach"):
            run(problem, "triton")
        return
    for key, value in run(problem, "triton").items():
        assert torch.equal(value, wanted[key]), key


def test_a_weight_beyond_32_bits_is_refused() -> None:
    problem = make((2, 2, 2, 4, 3), Case(coupling=False), dtype=torch.float32)
    weight = problem.inputs["weight"]
    problem.inputs["weight"] = far_apart(weight.shape, (12, FAR, 3, 1), weight)
    with pytest.raises(RuntimeError, match="the weight would reach"):
        run(problem, "triton")


def launches(problem: Any, monkeypatch: pytest.MonkeyPatch, need: tuple[str, ...] | None = None) -> list[str]:
    """The kernels that a forward and a backward of the problem launch, each with its mode if it has one.

    need: the inputs with a gradient, if not all of them.
    """
    found = kernels_of(lambda: run(problem, "triton", need), monkeypatch)
    return [" ".join([name, *filter(None, [keywords.get("MODE")])]) for name, keywords in found]


ACCUMULATE, MOMENTS, SUMS, GRADIENT = (
    "accumulate_kernel",
    "moments_kernel",
    "accumulate_gradient_kernel",
    "gradient_kernel",
)


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("case", "J", "kernels"),
    [
        # Nothing scores the votes: all couplings are equal, and no gradient is a sum over the input capsules.
        (PassCase(center=True, second=True), 3, [f"{ACCUMULATE} uniform", MOMENTS, GRADIENT]),
        (LINEAR, 3, [f"{ACCUMULATE} out", MOMENTS, f"{SUMS} out", MOMENTS, GRADIENT]),
        # The given log-sum-exp is what row_norm would compute.
        (
            normalized(LINEAR, "lse"),
            3,
            [f"{ACCUMULATE} row_norm", MOMENTS, f"{SUMS} row_norm", MOMENTS, GRADIENT],
        ),
        (
            LINEAR,
            330,
            [
                *("row_norm_kernel", f"{ACCUMULATE} row_norm", MOMENTS),
                *("row_norm_kernel", f"{SUMS} row_norm", MOMENTS, GRADIENT),
            ],
        ),
    ],
    ids=str,
)
def test_what_a_pass_launches(case: PassCase, J: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert launches(support_passes.make((2, 2, J, 3, 1), case, dtype=torch.float32), monkeypatch) == kernels


ITERATION = ["accumulate_kernel out", "update_kernel"]
BACK = [f"{SUMS} out", "update_gradient_kernel"]
BACK_IN_GROUPS = ["row_norm_kernel", f"{SUMS} row_norm", "update_gradient_kernel"]


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    ("case", "J", "kernels"),
    [
        (Case(), 20, [*BACK, *BACK, GRADIENT]),
        # With logits the couplings of the first iteration differ too: one more pass for coefficients, without sums.
        (Case(logits="BIJ"), 20, [*BACK, *BACK, BACK[0], GRADIENT]),
        (Case(gradient="last"), 20, [BACK[0], GRADIENT]),
        (Case(gradient="last"), 400, [*BACK_IN_GROUPS[:2], GRADIENT]),
        (Case(num_iterations=1, coupling=False), 20, [GRADIENT]),
        (Case(), 400, [*BACK_IN_GROUPS, *BACK_IN_GROUPS, GRADIENT]),
        (Case(softmax="in"), 20, [f"{SUMS} in", BACK[1], f"{SUMS} in", BACK[1], GRADIENT]),
    ],
    ids=str,
)
def test_what_a_backward_launches(case: Case, J: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    launched = launches(make((2, 2, J, 3, 2), case, dtype=torch.float32), monkeypatch)
    launched = launched[launched.index("restore_kernel") + 1 :]
    assert [name for name in launched if name != "add_up_kernel"] == kernels


@pytest.mark.parametrize(
    ("case", "J", "kernels"),
    [
        (Case(), 3, ["accumulate_kernel uniform", "update_kernel", *ITERATION, *ITERATION]),
        # In the only iteration all couplings are equal. The caller wants the couplings, so the kernel computes them.
        (Case(num_iterations=1), 3, ITERATION),
        (Case(num_iterations=1, logits="BIJ"), 3, ITERATION),
        (Case(num_iterations=1), 330, ["row_norm_kernel", "accumulate_kernel row_norm", "update_kernel"]),
        # A coupling is known only after all input capsules are summed.
        (
            Case(num_iterations=1, softmax="in"),
            3,
            ["accumulate_kernel uniform", "update_kernel", "accumulate_kernel in"],
        ),
    ],
    ids=str,
)
def test_the_coupling_is_written_by_the_last_iteration(
    case: Case, J: int, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make((2, 2, J, 3, 2), case, dtype=torch.float32)
    assert launches(problem, monkeypatch, need=()) == kernels
    found, wanted = run(problem, "triton", need=()), run(problem.to(torch.float64), "reference", need=())
    assert set(found) == {"v", "c"}
    for name, value in found.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["out", "in"])
@pytest.mark.parametrize("op", ["dynamic_routing", "routing_pass"])
def test_more_splits_than_are_added_up_at_once(op: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. The three splits of the interpreter would be added up in one step."""
    if op == "routing_pass":
        problem = support_passes.make((2, 20, 3, 6, 2), replace(normalized(EVERYTHING, how), leaky=True), op)
    else:
        problem = make((2, 20, 3, 6, 2), Case(softmax=how, logits="BIJ", leaky=True), op)
    wanted = run(problem.to(torch.float64), "reference")
    before = run(problem.to(torch.float32), "triton")
    monkeypatch.setattr(launch, "INTERPRETED", 20)
    plan.forget()
    found = run(problem.to(torch.float32), "triton")
    plan.forget()
    for name, value in found.items():
        torch.testing.assert_close(value.double(), wanted[name].double(), rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(value, before[name]) for name, value in found.items()), "sums have the same parts"


@pytest.mark.parametrize("spatial", [(), (3,)], ids=str)
def test_what_is_not_contiguous_is_copied(spatial: tuple[int, ...]) -> None:
    """Kernels get no strides of logits, masks and the gradient of the coupling."""
    case = Case(logits="BIJ", mask=True, out_mask=True, spatial=spatial)
    problem = make((3, 4, 5, 6, 2), case, "route_votes", torch.float32)
    wanted = run(problem, "triton")
    for values in (problem.inputs, problem.masks, problem.gradients):
        for name in values.keys() - {"votes", "v"}:
            values[name] = values[name].mT.contiguous().mT
            assert not values[name].is_contiguous()
    given = run(problem, "triton")
    assert all(torch.equal(value, wanted[name]) for name, value in given.items())
    assert not {"l_b", "m_b", "o_b", "d_b"} & set(accumulate_gradient_kernel.arg_names)


@pytest.mark.parametrize("op", ["route_votes", "votes_pass"])
def test_votes_of_all_outputs_in_groups(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of shared votes is a sum over outputs, and no program holds all outputs at once."""
    if op == "votes_pass":
        problem = support_passes.make((2, 2, 6, 3, 1), PassCase(query=True, second=True, shared="J"), op, torch.float32)
    else:
        problem = make((2, 2, 6, 3, 1), Case(logits="IJ"), op, torch.float32)
        problem.inputs["votes"] = problem.inputs["votes"][:, :, :1]
    wanted = run(problem.to(torch.float64), "reference")
    for name in config.TABLE:
        if name.split()[0] in ("accumulate", "accumulate_gradient", "gradient"):
            monkeypatch.setitem(config.TABLE, name, Choice(16, 1, chunk=1))
    plan.forget()
    assert "row_norm_kernel" in launches(problem, monkeypatch)
    for name, value in run(problem, "triton").items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("D", "what"), [(12, {"poses": 2}), (4, {"spatial": (5,)})], ids=str)
def test_outputs_in_groups(D: int, what: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pose matrices, and votes with positions, with more outputs than a program holds."""
    op = "routing_pass" if "poses" in what else "votes_pass"
    problem = support_passes.make((2, 2, 6, D, 2), replace(EVERYTHING, **what), op, torch.float32)
    wanted = run(problem.to(torch.float64), "reference")
    for name in config.TABLE:
        if name.split()[0] in ("accumulate", "accumulate_gradient", "gradient"):
            monkeypatch.setitem(config.TABLE, name, Choice(16, 1, chunk=1))
    plan.forget()
    assert "row_norm_kernel" in launches(problem, monkeypatch)
    for name, value in run(problem, "triton").items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=1e-4, atol=1e-5)


def test_one_tf32_product_rounds_to_the_nearest(tensor_cores: None, tf32_allowed: None) -> None:
    """Truncated operands would make all votes smaller, by a factor of 1 - 7e-4."""
    problem = make((17, 9, 3, 16, 8), Case(num_iterations=1, squash="identity"), dtype=torch.float32)
    for value in problem.inputs.values():
        value.uniform_(0.5, 1.0)
    got, truth = run(problem, "triton")["v"].double(), run(problem.to(torch.float64), "reference")["v"]
    assert abs((got / truth - 1).mean()) < 5e-5
    assert not run(problem_with_nan(problem), "triton")["v"][0].isfinite().any()


def problem_with_nan(problem: Any) -> Any:
    """Puts in the NaN that GPUs produce: all its bits but the sign are set."""
    problem.inputs["u"][0] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    return problem


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_users_interpret_16_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works without the repairs of tests/support/interpreter.py: no product in the interpreter gets 16-bit operands."""
    from triton.runtime import interpreter

    problem, dot = make((3, 3, 3, 8, 4), Case(logits="BIJ"), dtype=dtype), interpreter.interpreter_builder.create_dot

    def wide(a: Any, b: Any, *rest: Any) -> Any:
        assert a.data.dtype == b.data.dtype == np.float32
        return dot(a, b, *rest)

    wanted = run(problem, "triton")
    plan.forget()
    monkeypatch.setattr(launch, "WIDENED", True)
    monkeypatch.setattr(interpreter.interpreter_builder, "create_dot", wide)
    found = run(problem, "triton")
    plan.forget()
    for name, value in found.items():
        assert relative_l2(value.double(), wanted[name].double()) < 4 * torch.finfo(dtype).eps, name


def test_absence_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    state = capsfast.backends()["triton"]
    assert not state.available
    assert "there is no CUDA device" in state.reason
    assert state.devices == ("cuda",)
    monkeypatch.setattr(toolchain, "_why_not_installed", lambda: "the package triton is not installed")
    assert capsfast.backends()["triton"].reason == "the package triton is not installed"


def test_old_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    u: Any = SimpleNamespace(device=torch.device("cuda", 93), dtype=torch.float32, shape=(2, 3, 6), dim=lambda: 3)
    call = Call("capsfast.dynamic_routing", u, torch.empty(3, 4, 5, 6), RoutingParameters(), None, 4, 5)
    with pytest.raises(
        RuntimeError, match=r"'triton' cannot serve this call: .* capability 8\.0 or newer, .* has 7\.5"
    ):
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_for_amd(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On AMD GPUs kernels multiply float32 operands without splitting them."""
    problem = make((3, 4, 5, 6, 2), PLAIN, dtype=dtype)
    plain = errors(problem, "reference")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name, error in errors(problem, "triton").items():
        assert error < 2 * plain[name] + torch.finfo(dtype).eps, name


def test_the_interpreter_serves_only_who_asks() -> None:
    with recorded_ops() as ops:
        capsfast.dynamic_routing(torch.randn(2, 3, 6), torch.randn(3, 4, 5, 6))
    assert "capsfast::triton_dynamic_routing" not in ops


def test_too_large_capsules_are_refused() -> None:
    votes = torch.zeros(1, 1, 1, 513)
    with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: .* D up to 512, got 513"):
        capsfast.route_votes(votes, backend="triton")
    capsfast.route_votes(votes)
    u, weight = torch.zeros(1, 1, 33, 1), torch.zeros(1, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"'triton' cannot serve this call: .* up to 32 rows, got 33"):
        capsfast.dynamic_routing(u, weight, backend="triton")
