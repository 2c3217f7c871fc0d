"""torch's counters and policies, which know ops by name: FLOPs, selective checkpoints, profiles, memory."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import capsfast
from capsfast.nn import RoutedCaps
from capsfast.ops import factored_routing

from .support.backends import Backend, Shape, recorded_ops
from .support.passes import CASES as PASSES
from .support.passes import EVERYTHING
from .support.problems import CASES as ROUTINGS
from .support.problems import LOADED, AnyCase, Case, Op, PassCase, Problem, call, make, run


def counted(function: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def needs(problem: Problem) -> list[tuple[str, ...]]:
    """All inputs; each input alone; no input."""
    return [tuple(problem.inputs), *((name,) for name in problem.inputs), ()]


@pytest.mark.every_op
@pytest.mark.fused
@pytest.mark.rows((4, None), triton=(1, 4))
@pytest.mark.parametrize(
    "case",
    [
        *ROUTINGS,
        *PASSES,
        Case(poses=2, logits="IJ"),
        PassCase(query=True, poses=2),
        Case(spatial=(2, 3), logits="BIJ", bias=True),
        PassCase(query=True, precision=True, center=True, spatial=(3,), second=True),
    ],
    ids=str,
)
def test_flops_are_those_of_the_definition(
    backend: Backend, op: Op, case: AnyCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As counted when the definition runs: every contraction once, in the forward and for the gradients needed."""
    monkeypatch.setattr(factored_routing, "_pays", lambda call: False)
    given = op.make(Shape(3, 5, 4, 6, 2), case, torch.float32, backend.device)
    for need in needs(given):
        got, wanted = (counted(partial(run, given, name, need)) for name in (backend.name, "reference"))
        assert got == wanted > 0, need


@pytest.mark.every_op
@pytest.mark.fused
def test_flops_of_the_gradients_of_one_result(backend: Backend, op: Op) -> None:
    case = LOADED if op.family is Case else EVERYTHING
    given = op.make(Shape(3, 3, 4, 6, 2), case, torch.float32, backend.device)
    inputs = {name: value.requires_grad_() for name, value in given.inputs.items()}
    results = {name: case.outputs(call(given, inputs, name)) for name in (backend.name, "reference")}
    for output in results["reference"]:
        got, wanted = (
            counted(
                partial(
                    torch.autograd.grad, found[output].sum(), [*inputs.values()], retain_graph=True, allow_unused=True
                )
            )
            for found in results.values()
        )
        assert got == wanted > 0, output


@pytest.mark.parametrize("case", [case for case in ROUTINGS if case.shared], ids=str)
@pytest.mark.parametrize("own", [False, True], ids=["one matrix", "a matrix of each output"])
def test_flops_of_routing_without_votes(case: Case, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factored_routing, "_pays", lambda call: True)
    (B, I, J, D, K), r = (3, 7, 4, 6, 5), case.num_iterations
    given = make((B, I, J, D, K), case, dtype=torch.float32)
    if not own:
        given.inputs["weight"] = given.inputs["weight"][:, :1]
        given.inputs.setdefault("logits", torch.randn(I, J))

    def definition(problem: Problem, inputs: dict[str, torch.Tensor], backend: str | None) -> Any:
        """The contractions of routing that forms no votes; softmax and squash, which count 0, are left out."""
        u, weight = inputs["u"], inputs["weight"][0].expand(J, D, K)
        b = u.new_zeros(B, I, J) + inputs.get("logits", 0)
        for t in range(r):
            v = torch.einsum("jdk,bjk->bjd", weight, torch.einsum("bij,bik->bjk", b, u)) + inputs.get("bias", 0)
            if t + 1 < r:
                agreement = torch.einsum("bik,bjk->bij", u, torch.einsum("jdk,bjd->bjk", weight, v))
                b = b + (agreement.detach() if case.gradient == "last" else agreement)
        return (v, b) if case.coupling else v

    for need in needs(given):
        with recorded_ops() as ops:
            got = counted(partial(run, given, "cpp", need))
        assert "capsfast::factored_routing" in ops
        assert got == counted(partial(run, given, None, need, definition)) > 0, need


@pytest.mark.parametrize("routing", ["dynamic", "em", "variational", "attention"])
def test_flops_of_a_layer(routing: str) -> None:
    """Also without memory for the numbers, as Lightning's measure_flops is used."""
    from lightning.fabric.utilities.throughput import measure_flops

    counts = set()
    for device, backend in (("cpu", "cpp"), ("cpu", "reference"), ("meta", None)):
        layer = RoutedCaps(7, 4, 6, 5, routing=routing, backend=backend, device=device)
        u = torch.randn(3, 7, 6, device=device)
        activation = torch.rand(3, 7, device=device)
        counts.add(measure_flops(layer, lambda: sum(out.sum() for out in layer(u, activation)), torch.sum))  # noqa: B023
    assert len(counts) == 1
    assert counts.pop() > 0


def test_flops_are_registered_whatever_is_imported_first() -> None:
    for imports in (
        "from torch.utils.flop_counter import FlopCounterMode; import capsfast",
        "import capsfast; from torch.utils.flop_counter import FlopCounterMode",
    ):
        program = (
            f"import sys, torch; {imports}\n"
            "with FlopCounterMode(display=False) as counter:\n"
            "    capsfast.dynamic_routing(torch.randn(2, 3, 4), torch.randn(3, 5, 6, 4))\n"
            "assert not any(type(each).__module__.startswith('capsfast') for each in sys.meta_path)\n"
            "print(counter.get_total_flops())"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.stdout.split() == [str(2 * 2 * 3 * 5 * 6 * (4 + 5))], done.stderr


@pytest.mark.fused
def test_a_selective_checkpoint_saves_the_op(backend: Backend) -> None:
    layer = capsfast.DynamicRouting(7, 4, 6, 5, backend=backend.name).to(backend.device)
    u = torch.randn(3, 7, 6, device=backend.device, requires_grad=True)
    op, leaves = backend.op("dynamic_routing"), (u, layer.W)
    plain = torch.autograd.grad(layer(u).square().sum(), leaves)
    for saved, calls in (([op], 1), ([], 2)):
        policy = partial(create_selective_checkpoint_contexts, saved)
        with recorded_ops() as ops:
            loss = checkpoint(layer, u, use_reentrant=False, context_fn=policy).square().sum()
            again = torch.autograd.grad(loss, leaves)
        assert ops.count(op._schema.name) == calls
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.fused
def test_profiles_name_the_op_and_its_backward(backend: Backend) -> None:
    layer = capsfast.DynamicRouting(7, 4, 6, 5, backend=backend.name).to(backend.device)
    with torch.profiler.profile(record_shapes=True) as profile:
        layer(torch.randn(3, 7, 6, device=backend.device)).sum().backward()
    shapes = {event.key: event.input_shapes for event in profile.key_averages(group_by_input_shape=True)}
    for backward in (False, True):
        assert [3, 7, 6] in shapes[backend.op("dynamic_routing", backward)._schema.name]


def test_an_estimate_of_memory_has_no_votes() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    layer = capsfast.DynamicRouting(180, 4, 5, 6)
    with FakeTensorMode():
        layer.W = torch.nn.Parameter(torch.empty(layer.W.shape))
        with MemTracker() as tracker:
            layer(torch.randn(30, 180, 5)).sum().backward()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    assert 4 * layer.W.numel() < peak["Total"] < 4 * 30 * 180 * 4 * 6
