"""Tests of plans that C++ runs. Kernels are compiled for sm_90, and a stub of the CUDA driver records launches.

pytest does not collect this file: tests/all/test_triton_plan.py runs it in a process of its own, without Triton's
interpreter.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.calls import checks
from capsfast.environment import toolchain
from capsfast.triton import config, plan

from . import triton_host

launched = triton_host.stub()
# The backend sends calls to Triton as if Triton's interpreter ran, and looks at no numbers, as on a GPU.
toolchain.interpreting = lambda: True
checks.can_be_looked_at = lambda value: False

MOST = 256  # as in csrc/plans/serve.cpp


@pytest.fixture(autouse=True)
def no_launches() -> Iterator[None]:
    plan.forget()
    launched.clear()
    triton_host.taken()
    yield
    plan.forget()
    triton_host.taken()


def inputs(B: int = 3, grad: bool = False) -> tuple[Tensor, Tensor]:
    return tuple(torch.ones(size, requires_grad=grad) for size in ((B, 4, 8), (4, 5, 16, 8)))  # type: ignore[return-value]


def route(u: Tensor, weight: Tensor, **options: Any) -> Any:
    return capsfast.dynamic_routing(u, weight, 2, backend="triton", **options)


def names() -> tuple[list[str], list[str]]:
    """The kernels that Python launched, and those that C++ launched, since the last call."""
    return [each["name"] for each in triton_host.recorded(launched)], [
        parameter["name"] for parameter in triton_host.taken()
    ]


def test_zeros_come_before_who_reads_them() -> None:
    """A routing with logits starts with V = 0."""
    logits = torch.ones(4, 5)
    for _ in range(2):
        triton_host.taken()
        route(*inputs(), logits=logits)
    zeros, first, *_ = triton_host.taken()
    address, size = zeros["values"]
    assert zeros["name"] == "zeros" and size == 4 * 16 * 5 * 16
    assert first["name"] == "accumulate_kernel" and not first["early"] and address in first["values"]


def test_the_second_run_is_in_cpp() -> None:
    first, second = [(route(*inputs()), names())[1] for _ in range(2)]
    assert first[0] and not first[1]
    assert second == ([], first[0])


def test_outputs_are_tensors_of_their_own() -> None:
    """They hold no workspace, and no two runs share memory."""
    u, weight = inputs(grad=True)
    runs = [route(u, weight) for _ in range(3)]
    assert names()[1]
    assert len({run.data_ptr() for run in runs}) == 3
    for v in runs:
        assert v.shape == (3, 5, 16) and v.is_contiguous() and v.grad_fn is not None
        assert v.untyped_storage().nbytes() == 4 * v.numel()
    for n in range(2):
        v = route(u, weight)
        names()
        du, dweight = torch.autograd.grad(v, (u, weight), torch.ones_like(v))
        assert du.shape == u.shape and dweight.shape == weight.shape
        by_python, by_cpp = names()
        assert bool(by_python) == (n == 0) and bool(by_cpp) == (n == 1)


@pytest.mark.parametrize("refused", range(3))
def test_a_refused_launch_is_an_error(refused: int) -> None:
    """The error has the driver's words, nothing behind the refused launch is launched, and the next call works."""
    route(*inputs())
    count = len(names()[0])
    triton_host.taken(refuse_after=refused)
    with pytest.raises(RuntimeError, match=r"CUDA error: out of resources \(cuLaunchKernelEx\)"):
        route(*inputs())
    assert len(triton_host.taken()) == refused
    assert route(*inputs()).shape == (3, 5, 16)
    by_python, by_cpp = names()
    assert not by_python and len(by_cpp) == count


def test_hooks_of_profilers_keep_launches_in_python() -> None:
    """Triton's launcher calls the hooks."""
    from triton import knobs

    def hook(metadata: Any) -> None: ...

    route(*inputs())
    count = len(names()[0])
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        for B in (3, 3, 2, 2):  # a plan of before, and a new one
            route(*inputs(B))
            by_python, by_cpp = names()
            assert len(by_python) == count and not by_cpp
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    route(*inputs())
    assert len(names()[1]) == count


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("of a test"), KeyError("key"), KeyboardInterrupt(), MemoryError("none")], ids=repr
)
def test_an_error_of_planning_keeps_its_type(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(config, "tiles", fail)
        with pytest.raises(type(error)) as raised:
            route(*inputs())
    assert raised.value is error
    assert not plan._plans
    route(*inputs())
    # An error of C++ that comes later is not taken for this one.
    triton_host.taken(refuse_after=0)
    with pytest.raises(RuntimeError, match="out of resources"):
        route(*inputs())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt()], ids=repr)
def test_an_error_of_planning_in_an_op_and_in_compiled_code(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise error

    op = torch.ops.capsfast.triton_routing_pass.default
    options = ("out", False, False, False, False, False)
    calls = [
        lambda u, weight: op(u, weight, *(None,) * 9, None, *options),
        torch.compile(route, backend="aot_eager"),
    ]
    for call in calls:
        monkeypatch.setattr(config, "tiles", fail)
        with pytest.raises(type(error)):
            call(*inputs())
        monkeypatch.undo()
        call(*inputs())


def test_a_call_keeps_no_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first call of a signature, nor one that C++ runs, nor one that fails, in planning or in a launch."""
    u, weight = inputs(grad=True)
    query = torch.ones(3, 5, 16)
    upstream = torch.ones(3, 5, 16)

    def count() -> list[int]:
        launched.clear()  # the stub keeps arguments
        return [each._use_count() for each in (u, weight, query, upstream)]  # type: ignore[attr-defined]

    def call() -> None:
        first = capsfast.routing_pass(u, weight, query=query, logits=None, backend="triton").first
        torch.autograd.grad(first, (u, weight), upstream)

    before = count()
    for _ in range(3):
        call()
        assert count() == before
    for refused in (0, 2):
        triton_host.taken(refuse_after=refused)
        with pytest.raises(RuntimeError, match="out of resources"):
            call()
        triton_host.taken()
        assert count() == before
    plan.forget()
    monkeypatch.setattr(config, "tiles", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        call()
    assert count() == before


def test_an_error_of_planning_in_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    u, weight = inputs(grad=True)
    v = route(u, weight)
    with monkeypatch.context() as patch:
        patch.setattr(config, "tiles", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            v.sum().backward()


def test_what_is_another_signature() -> None:
    """C++ finds a plan for the same call alone."""
    u, weight = inputs()
    shifted = torch.ones(u.numel() + 1)[1:].view(u.shape)
    transposed = u.transpose(0, 1).contiguous().transpose(0, 1)
    calls: list[Callable[[], Any]] = [
        lambda: route(u, weight),
        lambda: route(shifted, weight),
        lambda: route(transposed, weight),
        lambda: route(u[:2], weight),
        lambda: route(u.bfloat16(), weight.bfloat16()),
        lambda: route(u, weight, eps=0.1),
        lambda: route(u, weight, squash="unit"),
        lambda: route(u, weight, return_coupling=True),
        lambda: route(u, weight, leaky=True),
        lambda: capsfast.dynamic_routing(u, weight, 3, backend="triton"),
    ]
    for _ in range(2):
        for call in calls:
            call()
    by_python = len(names()[0])
    again = [len((call(), names())[1][1]) for call in calls]
    assert by_python == sum(again) and all(again)


def test_plans_are_bounded() -> None:
    """The oldest goes first."""
    u, weight = inputs(MOST + 8)
    for B in range(1, MOST + 6):
        route(u[:B], weight)
    names()
    for B, kept in ((MOST + 5, True), (7, True), (1, False)):
        route(u[:B], weight)
        by_python, by_cpp = names()
        assert bool(by_cpp) == kept and bool(by_python) == (not kept), B


def test_forget() -> None:
    route(*inputs())
    plan.forget()
    names()
    route(*inputs())
    by_python, by_cpp = names()
    assert by_python and not by_cpp


def test_threads() -> None:
    """Threads run, make and drop plans at once."""
    u, weight = inputs(8, grad=True)
    failed: list[BaseException] = []

    def work(start: int) -> None:
        try:
            for n in range(60):
                B = 1 + (start + n) % 8
                v = route(u[:B], weight)
                assert v.shape == (B, 5, 16)
                torch.autograd.grad(v, weight, torch.ones_like(v))
                if n == 30:
                    plan.forget()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(2 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_call_without_input_capsules_or_samples() -> None:
    """Its plans make tensors and launch little or nothing."""
    for B, I in ((0, 4), (3, 0)):
        for _ in range(2):
            u, weight = torch.ones(B, I, 8, requires_grad=True), torch.ones(I, 5, 16, 8, requires_grad=True)
            v = route(u, weight)
            assert v.shape == (B, 5, 16)
            du, dweight = torch.autograd.grad(v, (u, weight), torch.ones_like(v))
            assert du.shape == u.shape and dweight.shape == weight.shape
            assert not du.any() and not dweight.any()


def test_ops_stay_ops() -> None:
    """A profile and a dispatch mode see the op, and a compiler its schema."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        with Mode():
            route(*inputs())
    assert seen.count("capsfast.triton_dynamic_routing.default") == 2
