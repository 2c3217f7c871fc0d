"""Recordings of launches: replays are the ordinary call, bit by bit, and another signature is recorded anew."""

import json
import os
import subprocess
import sys
import threading
import weakref
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
from ..support import problems as support_problems
from ..support.interpreter import kernels_of
from ..support.passes import EVERYTHING, PassCase, make_either, normalized, without_weight
from ..support.problems import LOADED, LOADED_OUT, Case, Problem, make, run, without_shared

pytestmark = pytest.mark.skipif(
    bool(toolchain.why_no_triton()) or not toolchain.interpreting(), reason="runs with Triton's interpreter"
)

if not toolchain.why_no_triton():
    from capsfast.triton import config, recorder, replay
    from capsfast.triton.config import Choice
    from capsfast.triton.recorder import Memory, arrange
    from capsfast.triton.recording import Recording

SHAPE = (3, 2, 5, 6, 2)
QUIET = Case(coupling=False)


@pytest.fixture(autouse=True)
def _no_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_recordings", {})


def ordinarily(problem: Problem) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "why_not", lambda: "it is compared with")
        return run(problem, "triton")


def other(problem: Problem) -> Problem:
    """Other values in other memory, with the same signature."""

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


def assert_replays(problem: Problem) -> None:
    run(problem, "triton")
    recorded = dict(replay._recordings)
    assert recorded
    assert [found for found in recorded.values() if isinstance(found, str)] == []
    wanted, got = ordinarily(other(problem)), run(other(problem), "triton")
    assert replay._recordings == recorded
    for name, value in got.items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("case", support_problems.CASES, ids=str)
def test_a_replay_is_the_ordinary_call(case: Case) -> None:
    assert_replays(make(SHAPE, case, dtype=torch.float32))


@pytest.mark.parametrize("case", without_shared((QUIET, LOADED, LOADED_OUT, Case(spatial=(3,), logits="BIJ"))), ids=str)
def test_a_replay_of_votes_is_the_ordinary_call(case: Case) -> None:
    assert_replays(make(SHAPE, case, "route_votes", torch.float32))


@pytest.mark.parametrize("case", support_passes.CASES, ids=str)
def test_a_replay_of_a_pass_is_the_ordinary_call(case: PassCase) -> None:
    assert_replays(support_passes.make(SHAPE, case, dtype=torch.float32))


@pytest.mark.parametrize("how", ["out", "in"])
@pytest.mark.parametrize("spatial", [(), (3,)], ids=str)
def test_a_replay_of_a_pass_over_votes_is_the_ordinary_call(how: str, spatial: tuple[int, ...]) -> None:
    case = replace(without_weight([normalized(EVERYTHING, how)])[0], spatial=spatial)
    assert_replays(support_passes.make(SHAPE, case, "votes_pass", torch.float32))


def test_a_gradient_of_the_mass_alone_is_repeated() -> None:
    """That of the first moment is None then."""
    problem = support_passes.make(SHAPE, PassCase(query=True), dtype=torch.float32)
    u, weight = (problem.inputs[name].requires_grad_() for name in ("u", "weight"))
    found = []
    for _ in range(2):
        out = capsfast.routing_pass(u, weight, query=problem.inputs["query"], backend="triton")
        found.append(torch.autograd.grad(out.mass.square().sum(), [u, weight]))
    assert [each for each in replay._recordings.values() if isinstance(each, str)] == []
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_what_torch_made_is_freed_after_its_last_use() -> None:
    """As in the ordinary call: a replay's peak of memory is no higher."""
    run(make(SHAPE, Case(softmax="in"), dtype=torch.float32), "triton")
    recordings = [each for each in replay._recordings.values() if not isinstance(each, str)]
    freed = [slot for each in recordings for _, done in each.steps for slot in done]
    assert freed and len(set(freed)) == len(freed)
    for each in recordings:
        assert not {place.slot for place in each.outputs} & {slot for _, done in each.steps for slot in done}


@pytest.mark.parametrize(
    "case", [QUIET, LOADED, PassCase(query=True, normalize="in"), replace(EVERYTHING, poses=2)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_other_dtypes_and_strides(case: Case | PassCase, dtype: torch.dtype, layout: str) -> None:
    assert_replays(make_either((18, 3, 4, 6, 3), case, dtype).laid_out(layout))


def test_outputs_in_groups_and_k_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in ("accumulate", "accumulate_gradient", "gradient"):
        monkeypatch.setitem(config.TABLE, kernel, Choice(16, 1, chunk=1))
    assert_replays(make((2, 3, 6, 4, 40), LOADED_OUT, dtype=torch.float32))


def test_empty_calls_are_right() -> None:
    for shape in ((0, 2, 3, 4, 2), (2, 0, 3, 4, 2), (2, 2, 0, 4, 2)):
        problem = make(shape, LOADED, dtype=torch.float32)
        for _ in range(3):
            got, wanted = run(problem, "triton"), ordinarily(problem)
            assert all(torch.equal(value, wanted[name]) for name, value in got.items())


@pytest.fixture
def u_and_weight() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 4, 2), torch.randn(4, 5, 6, 2)


def routed(u: Tensor, weight: Tensor, **options: Any) -> Any:
    return capsfast.dynamic_routing(u, weight, backend="triton", **options)


def test_what_is_another_signature(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    u, weight = u_and_weight
    # Four bytes behind an address that 16 divides.
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
            assert len(replay._recordings) == (len(calls) if again else n + 1)


def test_needs_are_part_of_a_signature(u_and_weight: tuple[Tensor, Tensor]) -> None:
    u, weight = u_and_weight
    counts = []
    for needed in ((True, True), (True, False), (False, True), (True, True)):
        given = [value.clone().requires_grad_(need) for value, need in zip((u, weight), needed, strict=True)]
        routed(*given).sum().backward()
        counts.append(len(replay._recordings))
    # A forward and three backwards. (The gradient of a sum is an expanded number: one more for its strides is none.)
    assert counts == [2, 3, 4, 4]


def test_one_tensor_as_two_arguments(u_and_weight: tuple[Tensor, Tensor]) -> None:
    """A later call of this signature may have two tensors there."""
    u, weight = u_and_weight
    same, another = torch.rand(3, 5, 6), torch.rand(3, 5, 6)

    def call(query: Tensor, center: Tensor) -> Tensor:
        return capsfast.routing_pass(u, weight, query=query, center=center, backend="triton").first

    call(same, same)
    assert len(replay._recordings) == 1
    got = call(same, another)
    assert len(replay._recordings) == 1
    replay._recordings.clear()
    assert torch.equal(got, call(same, another))


def test_two_views_of_one_tensor() -> None:
    """They lie at another distance in a later call."""
    shape = ((3, 4, 2), (4, 5, 6, 2))

    def inside(room: Tensor, second: int) -> list[Tensor]:
        return [
            room[:24].view(shape[0]),
            room[second : second + 240].view(shape[1]),
        ]

    routed(*inside(torch.randn(400), 32))
    near, far = torch.randn(400), torch.randn(400)
    far[128 : 128 + 240], far[:24] = near[32 : 32 + 240], near[:24]
    assert torch.equal(routed(*inside(far, 128)), routed(*inside(near, 32)))
    assert len(replay._recordings) == 1


def test_another_table_is_seen(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    def columns() -> list[int]:
        launches = kernels_of(lambda: routed(*u_and_weight), monkeypatch)
        return [keywords["JT"] * keywords["DP"] for _, keywords in launches if "JT" in keywords]

    routed(*u_and_weight)
    before = columns()
    with monkeypatch.context() as patch:
        patch.setitem(config.TABLE, "accumulate", Choice(16, 8))
        changed = columns()
        assert changed != before
        assert columns() == changed
    assert columns() == before


def test_recordings_are_bounded(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST", 2)
    for B in (1, 2, 3, 3, 2, 1):
        routed(u_and_weight[0][:B], u_and_weight[1])
        assert 0 < len(replay._recordings) <= 2


def test_fresh_memory_is_nan_in_a_replay(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above would see what no kernel wrote."""
    routed(*u_and_weight)
    ((key, found),) = replay._recordings.items()
    assert isinstance(found, Recording)
    replay._recordings[key] = found._replace(steps=())
    assert routed(*u_and_weight).isnan().all()


def test_threads(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    u, weight = u_and_weight
    wanted = {B: routed(u[:B], weight) for B in (1, 2, 3)}
    replay._recordings.clear()
    found: dict[int, list[Tensor]] = {thread: [] for thread in range(4)}

    def work(thread: int, B: int) -> None:
        for _ in range(3):
            found[thread].append(routed(u[:B], weight))

    # Triton's interpreter has one grid for all threads: launches take turns.
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


def test_an_error_is_no_recording(u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(config, "tiles", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            routed(*u_and_weight)
    assert not replay._recordings
    assert routed(*u_and_weight).isfinite().all()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: (x + float(x.sum()),), "_local_scalar_dense.default has a result that is no tensor"),
        (lambda x: (torch.cat([x, x]),), "cat.default has a list of tensors"),
        (lambda x: tuple(x.max(0)), "max.dim has 2 results"),
        (lambda x: (x[0],), "an output is an input"),
        (lambda x: (x + OUTSIDE,), "a tensor is none of the call's"),
    ],
)
def test_what_is_not_recorded(function: Callable[[Tensor], tuple[Tensor, ...]], why: str) -> None:
    x = torch.ones(2, 3)
    outputs, found = recorder.record(function, [x])
    assert isinstance(found, str) and why in found
    for got, wanted in zip(outputs, function(x), strict=True):
        assert torch.equal(got, wanted)


OUTSIDE = torch.ones(2, 3)


def test_operations_are_repeated() -> None:
    """In place, on views, with what they gave before: as the passes have them."""

    def function(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        room = x.new_empty(2, *x.shape)
        room[0] = x
        room[1].zero_()
        room[1, 1:] += x[1:] * 2
        total = room.sum(0)
        bits = mask.view(torch.uint8).to(torch.float32)
        return total[:, 1:], torch.where(mask, x, 0.0).contiguous() + bits, room.transpose(1, 2)

    replayed = replay.replayed(function)
    for _ in range(3):
        x, mask = torch.randn(3, 4), torch.rand(3, 4) > 0.5
        for got, wanted in zip(replayed(x, mask), function(x, mask), strict=True):
            assert torch.equal(got, wanted)
            assert got.stride() == wanted.stride()
    assert len(replay._recordings) == 1


def test_nothing_in_use_at_once_overlaps() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        memories = []
        for size, first, length in torch.randint(1, 9, (12, 3), generator=draw).tolist():
            memory = Memory("allocated", torch.empty(200 * size))
            memory.first, memory.last = first, first + length
            memories.append(memory)
        total = arrange(memories)
        for n, one in enumerate(memories):
            assert one.offset % 512 == 0 and one.offset + one.bytes <= total
            for two in memories[:n]:
                at_once = one.first <= two.last and two.first <= one.last
                apart = one.offset + one.bytes <= two.offset or two.offset + two.bytes <= one.offset
                assert apart or not at_once
        assert total <= sum(memory.bytes for memory in memories)


def test_partial_sums_of_passes_share_the_workspace() -> None:
    """As PyTorch's allocator would give the memory of one pass to the next."""
    problem = make((2, 12, 3, 16, 2), replace(QUIET, num_iterations=6), dtype=torch.float32)
    run(problem, "triton", need=())
    (found,) = replay._recordings.values()
    assert isinstance(found, Recording)
    workspace = next(size[0] for dtype, size, _ in found.fresh if dtype == torch.uint8)
    # Partial sums of three splits, and V.
    assert workspace <= 2 * 4 * (3 + 1) * 2 * 3 * 16 + 4 * 512


def test_other_releases_of_triton_take_the_ordinary_path(
    u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "is_interpreted", lambda: False)
    assert replay.why_not.__wrapped__() == ""
    with monkeypatch.context() as patch:
        patch.setattr("triton.__version__", "3.99.1")
        assert replay.why_not.__wrapped__() == "launches are repeated with triton 3.6 to 3.9, this is 3.99.1"
    with monkeypatch.context() as patch:
        patch.delattr("triton.compiler.CompiledKernel.run")
        assert "CompiledKernel" in replay.why_not.__wrapped__() and "has no run" in replay.why_not.__wrapped__()
    monkeypatch.setattr(replay, "why_not", lambda: "this Triton is another")
    routed(*u_and_weight)
    assert not replay._recordings


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_take_the_ordinary_path(
    name: str, u_and_weight: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told of a launch by Triton's own code."""
    from triton import knobs

    hook = getattr(knobs.runtime, name)
    monkeypatch.setattr(hook, "calls", [lambda metadata: None])
    routed(*u_and_weight)
    assert not replay._recordings
    monkeypatch.setattr(hook, "calls", [])
    routed(*u_and_weight)
    assert len(replay._recordings) == 1


def test_a_mode_inside_of_which_a_call_is_recorded(u_and_weight: tuple[Tensor, Tensor]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        ops: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append(str(op))
            return op(*args, **(kwargs or {}))

    outputs = []
    for _ in range(3):
        with Seen() as mode:
            outputs.append(routed(*u_and_weight))
    assert mode.ops == ["capsfast.triton_dynamic_routing.default"] * 3
    assert torch.equal(outputs[0], outputs[2])


def test_in_inference_mode_and_out_of_it(u_and_weight: tuple[Tensor, Tensor]) -> None:
    with torch.inference_mode():
        first, second = routed(*u_and_weight), routed(*u_and_weight)
    assert torch.equal(first, second)
    u, weight = (value.requires_grad_() for value in u_and_weight)
    v = routed(u, weight)
    assert len(replay._recordings) == 1
    v.sum().backward()
    assert u.grad is not None and weight.grad is not None


def test_a_recording_keeps_no_memory_that_the_call_has_freed() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(3):
            room = torch.empty(1000).zero_()
            known = weakref.ref(room)
            del room
            assert known() is None
        return (x + 1,)

    _, found = recorder.record(function, [torch.ones(3)])
    assert isinstance(found, Recording)


def test_recording_is_a_matter_of_its_thread() -> None:
    """torch.compile looks at flags of the process, which a mode usually sets; and it is not imported."""
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    def function(x: Tensor) -> tuple[Tensor, ...]:
        assert not is_in_torch_dispatch_mode()
        return (x + 1,)

    _, found = recorder.record(function, [torch.ones(3)])
    assert isinstance(found, Recording)
    program = (
        "import sys, torch, capsfast; u, weight = torch.randn(3, 2, 2), torch.randn(2, 3, 4, 2)\n"
        "for _ in range(2): capsfast.dynamic_routing(u, weight, backend='triton')\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_what_compiled_kernels_get_and_what_it_costs() -> None:
    """A replay gives the launcher what Triton itself would, in half the time or less: on a quiet machine a fifth."""
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
