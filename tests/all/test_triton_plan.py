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
from capsfast.environment import native, toolchain

from ..support.passes import EVERYTHING, PassCase, normalized
from ..support.problems import LOADED, LOADED_OUT, Case, Problem, make, run

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, plan
    from capsfast.triton.plan import Memory, Plan, Slot, arrange, planned


def other(problem: Problem) -> Problem:
    """The problem with other values in other memory, but with the same signature."""

    def changed(values: dict[str, Tensor], change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        fresh = {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            for name, tensor in values.items()
        }
        return {name: value.copy_(change(values[name])) for name, value in fresh.items()}

    return replace(
        problem,
        inputs=changed(problem.inputs, lambda value: value * 1.25),
        masks=changed(problem.masks, lambda value: value.roll(1, 0)),
        gradients=changed(problem.gradients, lambda value: value * 0.75),
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(coupling=False),
        LOADED,
        LOADED_OUT,
        Case(spatial=(3,), logits="BIJ", mask=True),
        EVERYTHING,
        normalized(EVERYTHING, "lse"),
        replace(normalized(EVERYTHING, "in"), spatial=(3,)),
    ],
    ids=str,
)
def test_a_plan_serves_other_values(case: Case | PassCase) -> None:
    """A plan keeps nothing of the first call's tensors."""
    problem = make((3, 2, 5, 6, 2), case, dtype=torch.float32)
    run(problem, "triton")
    plans = dict(plan._plans)
    got = run(other(problem), "triton")
    assert plan._plans == plans
    plan.forget()
    for name, value in run(other(problem), "triton").items():
        assert torch.equal(got[name], value), name


@pytest.fixture
def u_and_weight() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, 2), torch.randn(4, 5, 6, 2)


def routed(u: Tensor, weight: Tensor, **options: Any) -> Any:
    return capsfast.dynamic_routing(u, weight, backend="triton", **options)


def test_what_is_another_signature(u_and_weight: tuple[Tensor, Tensor]) -> None:
    """Calls that differ in one thing get results of their own, whatever was called before."""
    u, weight = u_and_weight
    # This tensor starts four bytes after a multiple of 16.
    shifted = torch.empty(u.numel() + 1)[1:].view(u.shape).copy_(u)
    assert u.data_ptr() % 16 == 0 and shifted.data_ptr() % 16 == 4

    def gradients(*needed: bool) -> Any:
        leaves = [value.clone().requires_grad_(need) for value, need in zip((u, weight), needed, strict=True)]
        routed(*leaves).sum().backward()
        return leaves[needed.index(True)].grad

    def of_pass(query: Tensor, center: Tensor) -> Any:
        return capsfast.routing_pass(u, weight, query=query, center=center, backend="triton").first

    same, another = torch.rand(2, 3, 5, 6)
    calls: list[Callable[[], Any]] = [
        lambda: routed(u, weight),
        lambda: routed(shifted, weight),
        lambda: routed(u.transpose(0, 1).contiguous().transpose(0, 1), weight),
        lambda: routed(u[:2], weight),
        lambda: routed(u.bfloat16(), weight.bfloat16()),
        lambda: routed(u, weight, eps=0.1),
        lambda: routed(u, weight, num_iterations=2),
        lambda: routed(u, weight, logits=torch.ones(4, 5)),
        lambda: routed(u, weight, return_coupling=True)[1],
        *(lambda needed=needed: gradients(*needed) for needed in ((True, True), (True, False), (False, True))),
        # A later call with this signature may pass two different tensors.
        lambda: of_pass(same, same),
        lambda: of_pass(same, another),
    ]
    found = [[call() for call in calls] for _ in range(2)]
    for n, call in enumerate(calls):
        plan.forget()
        alone = call()
        assert all(torch.equal(each[n], alone) for each in found), n


def test_plans_are_bounded(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MOST", 2)
    for B in (1, 2, 3, 3, 2, 1):
        routed(u_and_weight[0][:B], u_and_weight[1])
        assert 0 < len(plan._plans) <= 2


def test_threads(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    u, weight = u_and_weight
    wanted = {B: routed(u[:B], weight) for B in (1, 2, 3)}
    plan.forget()
    found: list[Tensor] = []
    # Triton's interpreter has one grid for all threads, so launches take turns.
    turns, launch = threading.Lock(), GridExecutor.__call__

    def in_turn(self: Any, *args: Any, **kwargs: Any) -> Any:
        with turns:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", in_turn)
    work = [lambda B=B: found.extend(routed(u[:B], weight) for _ in range(3)) for B in (1, 2, 3, 3)]
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(torch.equal(v, wanted[len(v)]) for v in found)


def test_an_error_leaves_no_plan(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(config, "tiles", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            routed(*u_and_weight)
    assert not plan._plans
    assert routed(*u_and_weight).isfinite().all()


def test_in_inference_mode_and_out_of_it(u_and_weight: tuple[Tensor, Tensor]) -> None:
    with torch.inference_mode():
        first, second = routed(*u_and_weight), routed(*u_and_weight)
    assert torch.equal(first, second)
    u, weight = (value.requires_grad_() for value in u_and_weight)
    routed(u, weight).sum().backward()
    assert u.grad is not None and weight.grad is not None


def test_what_kernels_take_for_aligned_is() -> None:
    """The interpreter does not notice. A GPU stops with an error."""

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
            memory.first_step, memory.last_step = first, first + length
            memories.append(memory)
        total = arrange(memories)
        for n, one in enumerate(memories):
            assert one.offset % 512 == 0 and one.offset + one.bytes <= total
            for two in memories[:n]:
                at_once = one.first_step <= two.last_step and two.first_step <= one.last_step
                apart = one.offset + one.bytes <= two.offset or two.offset + two.bytes <= one.offset
                assert apart or not at_once


def test_partial_sums_of_passes_share_the_workspace() -> None:
    """A pass reuses the memory of the pass before, as with PyTorch's allocator."""
    problem = make((2, 12, 3, 16, 2), Case(coupling=False, num_iterations=6), dtype=torch.float32)
    v = run(problem, "triton", need=())["v"]
    assert v.untyped_storage().nbytes() == 4 * v.numel()  # an output does not keep the workspace
    (found,) = plan._plans.values()
    workspace = next(size[0] for dtype, size, _ in found.new_forms if dtype == torch.uint8)
    # The workspace holds partial sums of three splits, and V.
    assert workspace <= 2 * 4 * (3 + 1) * 2 * 3 * 16 + 4 * 512


class Compiled:
    """A compiled kernel that launches again, and from its second launch on calls a hook of the user's that raises."""

    def __init__(self) -> None:
        self.launched: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.run

    def run(self, *signature: Any, stream: int) -> None:
        self.launched.append(stream)
        if len(self.launched) == 2:
            raise TypeError("of a hook")


class Other:
    """A compiled kernel from a release of Triton that takes other arguments."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *, stream: None


def launch_of(compiled: Any, launched: list[Any]) -> Any:
    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda x, **constants: launched.append((grid, x, constants)) or compiled

        @staticmethod
        def fn(x: Any, J: int) -> None: ...

    launch = plan.Launch(Kernel(), (2,), (7,), {"J": 3})
    launch.finish(lambda value: value)
    plan._warn_of_ordinary_launches.cache_clear()
    return launch


def test_a_kernel_starts_early_only_behind_a_kernel_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other kernels do is not known, and a grid without programs is not launched."""

    class Kernel:
        @staticmethod
        def fn(x: Any, PDL: bool = False) -> None: ...

    def early(pdl: bool) -> list[Any]:
        monkeypatch.setattr(plan, "has_pdl", lambda device: pdl)
        made = Plan(torch.device("cpu"))
        x = made.given(torch.ones(3))
        for programs in (2, 1, 0, 1, 1):
            made.launch(Kernel(), (programs,), x)
        y = made.compute(torch.neg, x)
        made.launch(Kernel(), (1, 1), y)
        made.finish([y])
        launches = [step for step in made.steps if isinstance(step, plan.Launch)]
        assert all(step.signature[1:] == [pdl] for step in launches)
        return [step.constants.get("launch_pdl") for step in launches]

    assert early(True) == [False, True, True, False, True, False]
    assert early(False) == [None] * 6


@pytest.mark.parametrize(
    ("device", "capability", "variable", "hip", "expected"),
    [
        ("cuda", (9, 0), None, None, True),
        ("cuda", (12, 0), "1", None, True),
        ("cuda", (9, 0), "0", None, False),
        ("cuda", (8, 9), None, None, False),
        ("cuda", (9, 4), None, "7.0", False),
        ("cpu", (9, 0), None, None, False),
    ],
)
def test_where_kernels_start_early(
    device: str,
    capability: tuple[int, int],
    variable: str | None,
    hip: str | None,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CAPSFAST_PDL", raising=False)
    if variable is not None:
        monkeypatch.setenv("CAPSFAST_PDL", variable)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert not plan.has_pdl.__wrapped__(torch.device(device))  # Triton's interpreter runs here
    with monkeypatch.context() as patch:
        patch.setattr(plan.triton.knobs.runtime, "interpret", False)
        assert plan.has_pdl.__wrapped__(torch.device(device)) == expected


@pytest.mark.parametrize("compiled", [object(), Other()])
def test_a_triton_that_launches_no_compiled_kernel_again_says_so_once(compiled: Any) -> None:
    launched: list[Any] = []
    launch = launch_of(compiled, launched)
    with pytest.warns(RuntimeWarning, match="does not launch a compiled kernel again .* ordinary path") as said:
        _ = [launch([], [], 0) for _ in range(3)]
    assert len(said) == 1
    assert launched == [((2, 1, 1), 7, {"J": 3} | plan.ALWAYS)] * 3


def test_an_error_of_a_hook_launches_nothing_again() -> None:
    """A hook may raise a TypeError after the launch. Kernels that add in place would then add twice."""
    first: list[Any] = []
    launch = launch_of(compiled := Compiled(), first)
    launch([], [], 5)
    launch([], [], 5)
    with pytest.raises(TypeError, match="of a hook"):
        launch([], [], 5)
    assert compiled.launched == [5, 5] and len(first) == 1


def in_a_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python without Triton's interpreter."""
    root = Path(capsfast.__file__).parent.parent
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "PYTEST_ADDOPTS")
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *arguments],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment | {"PYTHONPATH": str(root)},
        timeout=900,
    )


def test_compiled_kernels_get_what_triton_would_give() -> None:
    process = in_a_process("tests.support.triton_host")
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout) == []


@pytest.mark.skipif(native.extension is None, reason=native.why_absent)
def test_plans_in_cpp() -> None:
    tests = "tests/support/plans_in_cpp.py"
    process = in_a_process("pytest", "-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:benchmark", tests)
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-1000:]
