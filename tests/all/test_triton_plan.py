"""Plans of launches: a plan serves every call of its signature, and another signature gets another plan."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast import toolchain

from ..support import passes as support_passes
from ..support.passes import EVERYTHING, PassCase, normalized, without_weight
from ..support.problems import LOADED, LOADED_OUT, Case, Problem, make, run

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, plan, routing
    from capsfast.triton.plan import Compute, Memory, Plan, Slot, arrange, planned

SHAPE = (3, 2, 5, 6, 2)
QUIET = Case(coupling=False)


def of(case: Case | PassCase, op: str | None = None, dtype: torch.dtype = torch.float32) -> Problem:
    if isinstance(case, PassCase):
        return support_passes.make(SHAPE, case, op or "routing_pass", dtype)
    return make(SHAPE, case, op or "dynamic_routing", dtype)


def other(problem: Problem) -> Problem:
    """The problem with other values in other memory, but with the same signature."""

    def changed(values: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        fresh = {
            name: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype) for name, each in values.items()
        }
        return {name: each.copy_(change(values[name])) for name, each in fresh.items()}

    return replace(
        problem,
        inputs=changed(problem.inputs, lambda value: value * 1.25),
        masks=changed(problem.masks, lambda value: value.roll(1, 0)),
        gradients=changed(problem.gradients, lambda value: value * 0.75),
    )


@pytest.mark.parametrize(
    ("case", "op"),
    [
        (QUIET, "dynamic_routing"),
        (LOADED, "dynamic_routing"),
        (LOADED_OUT, "dynamic_routing"),
        (Case(softmax="in", logits="BIJ", bias=True, mask=True, leaky=True), "dynamic_routing"),
        (Case(spatial=(3,), logits="BIJ", mask=True), "route_votes"),
        (EVERYTHING, "routing_pass"),
        (normalized(EVERYTHING, "in"), "routing_pass"),
        (normalized(EVERYTHING, "lse"), "routing_pass"),
        (replace(without_weight([normalized(EVERYTHING, "in")])[0], spatial=(3,)), "votes_pass"),
    ],
    ids=str,
)
def test_a_plan_serves_other_values(case: Case | PassCase, op: str) -> None:
    """A plan keeps nothing of the first call's tensors."""
    problem = of(case, op)
    run(problem, "triton")
    plans = dict(plan._plans)
    got = run(other(problem), "triton")
    assert plan._plans == plans
    plan.forget()
    for name, value in run(other(problem), "triton").items():
        assert torch.equal(got[name], value), name


def test_empty_calls_are_right() -> None:
    for shape in ((0, 2, 3, 4, 2), (2, 0, 3, 4, 2), (2, 2, 0, 4, 2)):
        problem = make(shape, LOADED, dtype=torch.float32)
        wanted = run(problem, "reference")
        for _ in range(2):
            for name, value in run(problem, "triton").items():
                torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-5)


@pytest.fixture
def u_and_weight() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, 2), torch.randn(4, 5, 6, 2)


def routed(u: Tensor, weight: Tensor, **options: Any) -> Any:
    return capsfast.dynamic_routing(u, weight, backend="triton", **options)


def test_what_is_another_signature(u_and_weight: tuple[Tensor, Tensor]) -> None:
    u, weight = u_and_weight
    # This tensor starts four bytes after a multiple of 16.
    shifted = torch.empty(u.numel() + 1)[1:].view(u.shape).copy_(u)
    assert u.data_ptr() % 16 == 0 and shifted.data_ptr() % 16 == 4
    calls: list[Callable[[], Any]] = [
        lambda: routed(u, weight),
        lambda: routed(shifted, weight),
        lambda: routed(u.transpose(0, 1).contiguous().transpose(0, 1), weight),
        lambda: routed(u[:2], weight),
        lambda: routed(u.bfloat16(), weight.bfloat16()),
        lambda: routed(u, weight, eps=0.1),
        lambda: routed(u, weight, num_iterations=2),
        lambda: routed(u, weight, logits=torch.zeros(4, 5)),
        lambda: routed(u, weight, return_coupling=True),
    ]
    for again in range(2):
        for n, call in enumerate(calls):
            call()
            assert len(plan._plans) == (len(calls) if again else n + 1)


def test_needs_are_part_of_a_signature(u_and_weight: tuple[Tensor, Tensor]) -> None:
    u, weight = u_and_weight
    counts = []
    for needed in ((True, True), (True, False), (False, True), (True, True)):
        given = [value.clone().requires_grad_(need) for value, need in zip((u, weight), needed, strict=True)]
        routed(*given).sum().backward()
        counts.append(len(plan._plans))
    # Plans: one for the forward and three for the backwards.
    assert counts == [2, 3, 4, 4]


def test_one_tensor_as_two_arguments(u_and_weight: tuple[Tensor, Tensor]) -> None:
    """A later call with this signature may pass two different tensors."""
    u, weight = u_and_weight
    same, another = torch.rand(3, 5, 6), torch.rand(3, 5, 6)

    def call(query: Tensor, center: Tensor) -> Tensor:
        return capsfast.routing_pass(u, weight, query=query, center=center, backend="triton").first

    call(same, same)
    got = call(same, another)
    assert len(plan._plans) == 1
    plan.forget()
    assert torch.equal(got, call(same, another))


def test_plans_are_bounded(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST", 2)
    for B in (1, 2, 3, 3, 2, 1):
        routed(u_and_weight[0][:B], u_and_weight[1])
        assert 0 < len(plan._plans) <= 2


def test_fresh_memory_is_nan(u_and_weight: tuple[Tensor, Tensor]) -> None:
    """So tests notice numbers that no kernel wrote."""
    routed(*u_and_weight)
    (found,) = plan._plans.values()
    found.steps, found.done = [], []
    assert routed(*u_and_weight).isnan().all()


def test_threads(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    u, weight = u_and_weight
    wanted = {B: routed(u[:B], weight) for B in (1, 2, 3)}
    plan.forget()
    found: dict[int, list[Tensor]] = {thread: [] for thread in range(4)}

    def work(thread: int, B: int) -> None:
        for _ in range(3):
            found[thread].append(routed(u[:B], weight))

    # Triton's interpreter has one grid for all threads, so launches take turns.
    turns, launch = threading.Lock(), GridExecutor.__call__

    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turns:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", in_turn)
    threads = [threading.Thread(target=work, args=given) for given in enumerate((1, 2, 3, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs in found.values():
        assert len(outputs) == 3
        assert all(torch.equal(v, wanted[len(v)]) for v in outputs)


def test_an_error_leaves_no_plan(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(config, "tiles", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            routed(*u_and_weight)
    assert not plan._plans
    assert routed(*u_and_weight).isfinite().all()


def test_functions_of_torch() -> None:
    """Functions take parts and views; returning an argument adds no step; results are freed after the last use."""

    @planned
    def call(made: Plan, x: Slot, mask: Slot) -> tuple[Slot, ...]:
        assert x.contiguous() is x and made.compute(lambda value: None, x) is None and not made.steps
        bits = made.compute(lambda given: given.view(torch.uint8).to(torch.float32), mask)
        turned = made.compute(lambda value: value.T, x[1:])
        total = made.compute(torch.add, turned, bits[0, :3][0])
        room, seen, read = made.new(2, 3), made.new(2, 3), made.new(2, 3)
        made.compute(torch.t, seen)
        made.compute(torch.neg, read)
        assert seen.memory.alone and not read.memory.alone  # a view of the workspace would change later
        return total, made.compute(torch.add, bits, x.contiguous()), room[1], turned.contiguous()

    for _ in range(2):
        x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
        total, added, room, turned = call(x, mask)
        assert torch.equal(total, x[1:].T + mask[0, 0]) and torch.equal(added, x + mask.float())
        assert torch.equal(turned, x[1:].T) and turned.is_contiguous() and room.shape == (3,)
    (found,) = plan._plans.values()
    freed = [index for done in found.done for index in done]
    assert len(freed) == len(set(freed)) == 4 and not {place.tensor_index for place in found.outputs} & set(freed)


def test_what_kernels_take_for_aligned_is() -> None:
    @planned
    def call(made: Plan, x: Slot) -> tuple[Slot, ...]:
        whole = x.aligned()
        assert (whole is x) == (x.memory.alignment == 0)
        return tuple(made.compute(torch.neg, each) for each in (whole, x[1:].aligned()))

    for x in (torch.randn(3, 5), torch.randn(16)[1:].view(3, 5)):
        whole, part = call(x)
        assert torch.equal(whole, -x) and torch.equal(part, -x[1:])


def test_nothing_in_use_at_once_overlaps() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        memories = []
        for size, first, length in torch.randint(1, 9, (12, 3), generator=draw).tolist():
            memory = Memory("new", (torch.float32, (200 * size,), (1,)))
            memory.first, memory.last = first, first + length
            memories.append(memory)
        total = arrange(memories)
        for n, one in enumerate(memories):
            assert one.offset % 512 == 0 and one.offset + one.bytes <= total
            for two in memories[:n]:
                at_once = one.first <= two.last and two.first <= one.last
                apart = one.offset + one.bytes <= two.offset or two.offset + two.bytes <= one.offset
                assert apart or not at_once


def test_partial_sums_of_passes_share_the_workspace() -> None:
    """A pass reuses the memory of the pass before, as with PyTorch's allocator."""
    problem = make((2, 12, 3, 16, 2), replace(QUIET, num_iterations=6), dtype=torch.float32)
    v = run(problem, "triton", need=())["v"]
    assert v.untyped_storage().nbytes() == 4 * v.numel()  # an output does not keep the workspace
    (found,) = plan._plans.values()
    workspace = next(size[0] for dtype, size, _ in found.new_forms if dtype == torch.uint8)
    # The workspace holds partial sums of three splits, and V.
    assert workspace <= 2 * 4 * (3 + 1) * 2 * 3 * 16 + 4 * 512


@pytest.mark.parametrize("gradient", ["full", "last"])
def test_parts_of_the_batch_need_no_second_gradient_of_the_votes(
    gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their coefficients take half of the votes: two gradients of these would be more than all coefficients."""
    problem = make((40, 6, 3, 4, 1), replace(QUIET, gradient=gradient), "route_votes", torch.float32)
    run(problem, "triton")
    _, whole = plan._plans.values()
    monkeypatch.setattr(routing, "MOST_COEFFICIENTS", 0)
    plan.forget()
    run(problem, "triton")
    _, parts = plan._plans.values()
    # The coefficients of a single iteration are half of votes of four numbers.
    assert (len(parts.steps) > len(whole.steps)) == (gradient == "full")
    results = [step.result.form[1] for step in parts.steps if isinstance(step, Compute)]
    assert all(torch.Size(size).numel() < problem.inputs["votes"].numel() for size in results)


class Other:
    """A compiled kernel from a release of Triton that takes other arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *, stream: None


@pytest.mark.parametrize("compiled", [object(), Other()])
def test_a_triton_that_launches_no_compiled_kernel_again_says_so_once(compiled: Any) -> None:
    class Kernel:
        launched: list[Any] = []  # noqa: RUF012

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda x, **constants: self.launched.append((grid, x, constants)) or compiled

        @staticmethod
        def fn(x: Any, J: int) -> None: ...

    launch = plan.Launch(Kernel(), (2,), (7,), {"J": 3})
    launch.finish(lambda value: value)
    plan._warn_of_ordinary_launches.cache_clear()
    with pytest.warns(RuntimeWarning, match="does not launch a compiled kernel again .* ordinary path") as said:
        _ = [launch([], [], 0) for _ in range(3)]
    assert len(said) == 1
    assert Kernel.launched == [((2, 1, 1), 7, {"J": 3} | plan.ALWAYS)] * 3


def test_an_error_of_a_hook_launches_nothing_again() -> None:
    """A hook may raise a TypeError after the launch. Kernels that add in place would then add twice."""
    launched: list[int] = []

    class Compiled:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return self.run

        def run(self, *signature: Any, stream: int) -> None:
            launched.append(stream)
            if len(launched) == 2:
                raise TypeError("of a hook")

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda x, **constants: Compiled()

        @staticmethod
        def fn(x: Any) -> None: ...

    launch = plan.Launch(Kernel(), (2,), (7,), {})
    launch.finish(lambda value: value)
    launch([], [], 5)
    launch([], [], 5)
    with pytest.raises(TypeError, match="of a hook"):
        launch([], [], 5)
    assert launched == [5, 5]


def test_a_mode_sees_one_op(u_and_weight: tuple[Tensor, Tensor]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        ops: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(str(op))
            return op(*args, **(kwargs or {}))

    outputs = []
    for _ in range(2):
        with Seen() as mode:
            outputs.append(routed(*u_and_weight))
    assert mode.ops == ["capsfast.triton_dynamic_routing.default"] * 2
    assert torch.equal(*outputs)


def test_in_inference_mode_and_out_of_it(u_and_weight: tuple[Tensor, Tensor]) -> None:
    with torch.inference_mode():
        first, second = routed(*u_and_weight), routed(*u_and_weight)
    assert torch.equal(first, second)
    u, weight = (value.requires_grad_() for value in u_and_weight)
    v = routed(u, weight)
    assert len(plan._plans) == 1
    v.sum().backward()
    assert u.grad is not None and weight.grad is not None


def test_what_compiled_kernels_get_and_what_it_costs() -> None:
    """A plan gives the launcher what Triton would give, in at most half the time; in a quarter on a quiet machine."""
    root = Path(capsfast.__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.triton_host", "json"]
    process = subprocess.run(
        command, capture_output=True, text=True, cwd=root, env=environment | {"PYTHONPATH": str(root)}, timeout=900
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found = json.loads(process.stdout)
    assert found["differences"] == []
    took = found["microseconds"]
    for what in ("forward", "forward under autograd", "backward"):
        assert 2 * took[what] < took[f"{what}, ordinary"], took
