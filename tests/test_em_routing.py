"""EM routing as one op, against the passes and updates that it replaces."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.environment import native, toolchain
from capsfast.nn import EMRouting
from capsfast.nn.couplings import RecordedVotes
from capsfast.nn.routing.votes import PassVotes, Votes
from capsfast.ops import em_routing

Layer = dict[str, Any]
SIZES = {"B": 5, "I": 9, "J": 3, "D": 5, "K": 4}
CASES: dict[str, Layer] = {
    "plain": {},
    "momentum": {"momentum": 0.1},
    "isotropic": {"isotropic": True},
    "leaky": {"leaky": True},
    "softmax": {"nonlinearity": "softmax", "masked": True},
    "mass": {"cost": "mass", "cost_scale": 0.7, "momentum": 0.1},
    "inputs": {"cost_scale": "inputs", "component_beta": True},
    "one iteration": {"num_iterations": 1},
    "one iteration, equal": {"num_iterations": 1, "active": False, "masked": True},
    "equal activations": {"active": False},
    "masks": {"masked": True, "momentum": 0.2, "isotropic": True, "leaky": True},
    "pose matrices": {"P": 2, "D": 6},
    "shared weight": {"shared": True},
    "few for the origin": {"stride": 3},
    "few, masked": {"stride": 2, "masked": True},
    "votes": {"votes": 3},
    "one vote for all": {"votes": 1},
    "positions": {"votes": 3, "spatial": (2, 3), "masked": True},
    "one position": {"votes": 3, "spatial": (1,)},
    "many capsules": {"J": 12, "D": 64, "I": 2, "B": 2, "num_iterations": 2},
    "many, equal": {"J": 9, "D": 128, "I": 2, "B": 1, "active": False, "masked": True, "leaky": True},
    "large batch": {"B": 40},
}
triton = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
    ),
)
cpp = pytest.param("cpp", marks=pytest.mark.skipif(native.extension is None, reason=native.why_absent))
on_every_backend = pytest.mark.parametrize("name", [cpp, triton])


def run(layer: Layer, name: str, dtype: torch.dtype = torch.float32, needed: Any = None) -> list[Tensor]:
    """Results, and gradients of the needed inputs, by their numbers: u and the weight, activation, parameters."""
    options = {**SIZES, "P": 1, "votes": 0, "spatial": (), "shared": False, "active": True, "masked": False, **layer}
    B, I, J, D, K, P, count, spatial, shared, active, masked = (
        options.pop(size) for size in (*SIZES, "P", "votes", "spatial", "shared", "active", "masked")
    )
    torch.manual_seed(0)
    routing = EMRouting(I, J, P * K, D, backend=name, inverse_temperature=1.0, **options)
    for value in routing.parameters():
        torch.nn.init.normal_(value)
    if count:
        given = [torch.randn(B, I, count, D, *spatial)]
    elif P > 1:
        given = [torch.randn(B, I, P, K), torch.randn(I, J, K, D // P) / 2]
    else:
        given = [torch.randn(B, I, K), torch.randn(1 if shared else I, J, D, K) / 2]
    given += [torch.rand(B, I, *spatial)] * active
    given = [value.to(dtype) for value in given]
    masks = {"mask": torch.rand(B, I) < 0.7, "out_mask": torch.rand(B, J) < 0.7} if masked else {}
    if masked:
        masks["out_mask"][0] = False
    inputs = [*given, *routing.parameters()]
    for n, value in enumerate(inputs):
        value.requires_grad_(needed is None or n in needed)
    votes = given[0] if count else (given[0], given[1])
    results = routing(votes, given[-1] if active else None, **masks)
    upstream = [torch.randn(value.shape).to(value.dtype) for value in results]
    leaves = [value for value in inputs if value.requires_grad]
    return [*results, *torch.autograd.grad(tuple(results), leaves, upstream)]


@pytest.fixture
def by_op(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends of the calls of the op."""
    calls: list[str] = []
    real = em_routing.run
    monkeypatch.setattr(em_routing, "run", lambda *args: calls.append(args[-1]) or real(*args))
    return calls


def by_passes(*args: Any) -> list[Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassVotes, "_gaussians", Votes._gaussians)
        return run(*args)


def compare(name: str, by_op: list[str], *args: Any, rtol: float = 0.0) -> None:
    """Triton gives the bits of the passes. The gradients have roundings of their own, because one gradient pass adds
    up the iterations, and because a center has a gradient only where it does not cancel."""
    got, want = run(*args), by_passes(*args)
    assert by_op == [name]
    for n, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.dtype == other.dtype
        if n < 2 and name == "triton":
            assert torch.equal(one, other)
        # Sums of a masked softmax are small differences of large terms.
        atol = (rtol or 2e-6) * float(other.detach().abs().max()) + (1e-7 if n > 1 else 0.0)
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


@on_every_backend
@pytest.mark.parametrize("layer", CASES.values(), ids=CASES.keys())
def test_same_as_the_passes(name: str, layer: Layer, by_op: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsfast.nn.routing.votes.STRIDE", layer.get("stride", 17))
    compare(name, by_op, {key: value for key, value in layer.items() if key != "stride"}, name)


@on_every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(name: str, dtype: torch.dtype, by_op: list[str]) -> None:
    """The passes round the gradient of every iteration; the op rounds their sum."""
    compare(name, by_op, {"masked": True}, name, dtype, rtol=2 * torch.finfo(dtype).eps)


@on_every_backend
@pytest.mark.parametrize("needed", [[0], [1], [2], [3], [0, 4], [1, 2]], ids=str)
def test_some_gradients(name: str, needed: list[int], by_op: list[str]) -> None:
    compare(name, by_op, {"momentum": 0.1}, name, torch.float32, needed)


@on_every_backend
def test_bits_repeat(name: str) -> None:
    one, other = (run({"masked": True}, name) for _ in range(2))
    assert all(map(torch.equal, one, other))


@triton.marks[0]
@pytest.mark.parametrize("layer", [{}, {"votes": 1, "D": 2}, {"votes": 3, "spatial": (4,), "masked": True}], ids=str)
def test_a_batch_in_parts(layer: Layer, by_op: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The coefficients of few samples at a time are in memory if they would take more than the votes."""
    from capsfast.triton import dynamic_routing, plan

    monkeypatch.setattr(dynamic_routing, "MOST_COEFFICIENTS", 0)
    monkeypatch.setattr(dynamic_routing, "FULL", 1)
    plan.forget()
    compare("triton", by_op, {"D": 3, **layer}, "triton")


@triton.marks[0]
@pytest.mark.parametrize(
    "layer", [{}, {"masked": True, "momentum": 0.1, "J": 9, "D": 128, "I": 2, "B": 1}, {"votes": 3}], ids=str
)
def test_plans_only_launch(layer: Layer) -> None:
    """So C++ runs them."""
    from capsfast.triton import plan

    run(layer, "triton")
    forward, backward = plan._plans.values()
    steps = [type(step) for each in (forward, backward) for step in each.steps]
    assert set(steps) == {plan.Launch}
    # The outputs and one workspace.
    assert len(forward.new_forms) == 4 and len(backward.new_forms) <= 6
    if not layer:
        # Origin: three. Every iteration: arrange, accumulate, update, em_update.
        assert [len(forward.steps), len(backward.steps)] == [15, 15]


class Annealed(EMRouting):
    def _update(self, votes: Any, t: int) -> Any:
        return super()._update(votes, t)._replace(floor=1 / (t + 1), inverse_temperature=5.0)


class Counted(PassVotes):
    count = 0

    def moments(self, **arguments: Any) -> Any:
        self.count += 1
        return super().moments(**arguments)


@on_every_backend
def test_what_a_user_changes_counts(name: str, by_op: list[str]) -> None:
    """The number of iterations after the start, the update of a subclass, the passes of a subclass of votes."""
    torch.manual_seed(0)
    u, weight = torch.randn(2, 9, 4), torch.randn(9, 3, 5, 4)
    for kind in (EMRouting, Annealed):
        found = []
        for backend in (name, "reference"):
            routing = kind(9, 3, 4, 5, backend=backend)
            routing.num_iterations = 2
            found.append(routing((u, weight)))
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert by_op == [name]
    votes = Counted("test", u, weight, backend=name)
    EMRouting(9, 3, 4, 5, backend=name)(votes)
    assert votes.count == 3 and by_op == [name]

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    with Mode():
        EMRouting(9, 3, 4, 5, backend=name)((u, weight))
    assert seen.count(capsfast.routing_pass) == 4


@pytest.mark.parametrize("hidden", [slice(0, None, 17), slice(1, None, 17)], ids=["the 17th", "others"])
def test_a_mask_of_given_votes_tells_which_stand_for_all(hidden: slice) -> None:
    """Far from 0, second moments cancel about an origin without mass."""
    torch.manual_seed(0)
    votes, mask = 1000 + torch.randn(2, 400, 3, 5), torch.ones(2, 400, dtype=torch.bool)
    mask[:, hidden] = False
    found = EMRouting(400, 3, 4, 5, floor=0.01)(votes, mask=mask)
    exact = EMRouting(400, 3, 4, 5, floor=0.01, backend="reference").double()(votes.double(), mask=mask)
    torch.testing.assert_close(found.poses.double(), exact.poses, rtol=3e-7, atol=0)
    torch.testing.assert_close(found.activations.double(), exact.activations, rtol=1e-4, atol=1e-4)


@on_every_backend
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # Python reads sizes
def test_who_has_the_op(name: str, by_op: list[str]) -> None:
    """Only eager votes of one call have it."""
    u, weight = torch.randn(2, 9, 4), torch.randn(9, 3, 5, 4)
    routing = EMRouting(9, 3, 4, 5, backend=name).requires_grad_(False)
    votes = PassVotes("test", u, weight, backend=name)
    for count, function in (
        (1, lambda: routing((u, weight))),
        (1, torch.autocast("cpu")(lambda: routing((u, weight)))),
        (0, lambda: routing(RecordedVotes(votes))),
        (0, lambda: routing((u, weight[:, :1]))),
        (0, lambda: routing((u[:0], weight))),
        (0, lambda: EMRouting(9, 3, 4, 5, backend="reference")((u, weight))),
        (0, lambda: torch.func.vmap(lambda x: routing((x, weight)).poses)(u[None])),
        (0, lambda: torch.func.grad(lambda x: routing((x, weight)).poses.sum())(u)),
        (0, lambda: torch.jit.trace(lambda x: tuple(routing((x, weight))), (u,), check_trace=False)),
    ):
        by_op.clear()
        function()
        assert by_op == [name] * count


@triton.marks[0]
def test_masked_votes_reach_nothing() -> None:
    """They may be NaN."""
    torch.manual_seed(0)
    votes, activation = torch.randn(2, 9, 3, 5), torch.rand(2, 9, requires_grad=True)
    mask, out_mask = torch.ones(2, 9, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    mask[:, 2] = out_mask[:, 1] = False
    votes[:, 2] = votes[:, :, 1] = math.nan
    results = EMRouting(9, 3, 4, 5, backend="triton")(votes.requires_grad_(), activation, mask=mask, out_mask=out_mask)
    gradients = torch.autograd.grad(sum(value.square().sum() for value in results), [votes, activation])
    assert all(value.isfinite().all() for value in (*results, *gradients))
    assert torch.equal(gradients[0].ne(0), ~votes.isnan()) and torch.equal(gradients[1].ne(0), mask)


@on_every_backend
@pytest.mark.parametrize("r", [1, 2, 3, 4])
def test_inference_gives_the_bits_of_training(name: str, r: int) -> None:
    """Without a gradient two iterations take turns in memory."""
    torch.manual_seed(0)
    u, weight = torch.randn(2, 9, 4), torch.randn(9, 3, 5, 4)
    routing = EMRouting(9, 3, 4, 5, num_iterations=r, momentum=0.1, backend=name)
    with torch.no_grad():
        found = routing((u, weight), torch.rand(2, 9).fill_(0.4))
    wanted = routing((u, weight.requires_grad_()), torch.rand(2, 9).fill_(0.4))
    assert wanted.poses.requires_grad and all(torch.equal(*each) for each in zip(found, wanted, strict=True))


@on_every_backend
def test_opcheck(name: str) -> None:
    prefix = {"cpp": "", "triton": "triton_"}[name]
    op, backward = (getattr(torch.ops.capsfast, f"{prefix}em_routing{end}") for end in ("", "_backward"))
    torch.manual_seed(0)
    B, I, J, D, K = 2, 3, 4, 5, 2
    masks = torch.rand(B, I) < 0.7, torch.rand(B, J) < 0.7
    rest = (None, [1.0, 2.0], 1.0, 0.1, False, "variance", 0.0, "sigmoid", True, 1, False)
    floats = torch.randn(B, I, K), torch.randn(I, J, D, K), torch.rand(B, I), torch.randn(J), torch.randn(J)
    torch.library.opcheck(op.default, (*floats, *masks, *rest, False))
    assert op(*floats, *masks, *rest, False)[2].numel() == 0
    leaves = [value.requires_grad_() for value in floats]
    torch.library.opcheck(op.default, (*leaves, *masks, *rest, True))
    poses, activations, state = (value.detach() for value in op(*floats, *masks, *rest, True))
    assert state.numel() == 2 * B * J * (4 * D + 2)
    detached = [value.detach() for value in floats]
    for needed in (True, False):
        arguments = (poses, None, *detached, *masks, state, *rest, [needed] * 5)
        torch.library.opcheck(backward.default, arguments)


def test_errors_are_those_of_the_passes() -> None:
    u, weight = torch.randn(2, 9, 4, requires_grad=True), torch.randn(9, 3, 5, 4)
    (first,) = torch.autograd.grad(EMRouting(9, 3, 4, 5)((u, weight)).poses.sum(), u, create_graph=True)
    with pytest.raises(RuntimeError, match=r"capsfast\.routing_pass: the fused backends have no second derivative"):
        first.sum().backward()
    with pytest.raises(RuntimeError, match=r"capsfast\.routing_pass: backend 'cuda' cannot serve this call"):
        EMRouting(9, 3, 4, 5, backend="cuda")((u, weight))
    with pytest.raises(ValueError, match=r"activation must not be negative"):
        EMRouting(9, 3, 4, 5)((u, weight), torch.full((2, 9), -1.0))


@on_every_backend
def test_flops_are_those_of_the_passes(name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    u, weight = torch.randn(2, 9, 4, requires_grad=True), torch.randn(9, 3, 5, 4, requires_grad=True)
    counts = []
    for backend in (name, "reference"):
        with FlopCounterMode(display=False) as counter:
            sum(tensor.sum() for tensor in EMRouting(9, 3, 4, 5, backend=backend)((u, weight))).backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
