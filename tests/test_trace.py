"""capsfast.adopt.trace: what a trace of forward and backward reports, and what it treats as harmless."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from capsfast.adopt.trace import BranchError, Trace, UntraceableError, trace

LEFT_OUT = torch.full((3,), 2.0)


def traced(run: Callable[..., Tensor], symbolic: bool = False, **more: Tensor) -> Trace:
    """Traces a function of ``u [5, 3]`` and of more tensors by name; non-empty ones are floats."""
    given = {"u": torch.randn(5, 3, requires_grad=True), **more}
    numbers = [name for name, tensor in given.items() if tensor.is_floating_point()]
    return trace(lambda tensors: [run(**tensors)], given, numbers, "u", symbolic)


def hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The square of u, with a hook that changes its gradient."""

    def run(u: Tensor) -> Tensor:
        found = u * u
        found.register_hook(change)
        return found

    return run


THRESHOLDS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "clamp": (lambda u: u.clamp(max=1000), "clamp"),
    "clamp by a small bound below 0": (lambda u: u.clamp_min(-1e-12), "clamp_min"),
    "relu": (lambda u: u.relu(), "relu"),
    "round": (lambda u: u + u.round(), "round"),
    "nan_to_num": (lambda u: u.nan_to_num(), "nan_to_num"),
    "a comparison that chooses": (lambda u: torch.where(u == 7, 0.0, u), "eq"),
    "a number taken out": (lambda u: u * u.sum().item(), "_local_scalar_dense"),
    "a number of entries": (lambda u: u[u > 0], "gt"),
    "in place": (lambda u: u.clone().clamp_(max=9), "clamp"),
    "integers": (lambda u: u * u.long(), "_to_copy"),
    "largest entries": (lambda u: u.topk(2).values, "topk"),
    "in the gradient alone": (hooked(lambda gradient: gradient.clamp(-10, 10)), "clamp"),
    "a finite gradient alone": (hooked(lambda gradient: gradient.nan_to_num()), "nan_to_num"),
}


@pytest.mark.parametrize("name", THRESHOLDS)
def test_what_only_special_numbers_show_is_named(name: str) -> None:
    run, operation = THRESHOLDS[name]
    assert operation in traced(run).thresholds


HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "routing": lambda u: (u.softmax(0)[..., None] * u[:, None]).sum(1) / torch.sqrt(u.square().sum() + 1e-8),
    "eps by a bound": lambda u: u / u.norm(dim=-1, keepdim=True).clamp_min(1e-12),
    "normalize": lambda u: F.normalize(u, dim=-1),
    "a norm, whose gradient at 0 is 0": lambda u: u.norm(dim=-1),
    "a maximum, whose gradient has one place": lambda u: u - u.max(1, keepdim=True).values,
    "log_softmax": lambda u: u.log_softmax(1).exp(),
    "a loud result that nothing uses": lambda u: (u.clamp(0, 1), u * 1)[1],
    "a hook that scales": hooked(lambda gradient: 2 * gradient),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_random_numbers_show_is_no_threshold(name: str) -> None:
    found = traced(HARMLESS[name])
    assert found.thresholds == () and found.reads == {"u"} and not (found.random or found.outside)


def test_a_mask_may_be_compared_and_numbers_may_not() -> None:
    def run(u: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask > 0.5, u, 0 * u)

    assert traced(run, mask=torch.ones(5, 3, dtype=torch.int)).thresholds == ()
    assert traced(run, mask=torch.ones(5, 3)).thresholds == ("gt",)


def test_what_is_read_is_named_where_the_gradient_alone_reads_it() -> None:
    def run(u: Tensor, read: Tensor, unread: Tensor, backward: Tensor) -> Tensor:
        found = u * read
        found.register_hook(lambda gradient: gradient * backward)
        return found + 0 * 1

    names = ("read", "unread", "backward")
    assert traced(run, **{name: torch.ones(3) for name in names}).reads == {"u", "read", "backward"}


def test_tensors_from_outside_and_numbers_written_down() -> None:
    assert traced(lambda u: u * LEFT_OUT).outside
    assert not traced(lambda u: u * torch.tensor(0.5)).outside
    assert not traced(lambda u: (u * LEFT_OUT, u)[1]).outside
    assert traced(lambda u: u + torch.rand(3)).random and not traced(lambda u: (torch.rand(3), u)[1]).random


@pytest.mark.parametrize(
    "run",
    [
        lambda u: u if u.mean() > 0 else -u,
        lambda u: u if u.sum().item() > 0 else -u,
        lambda u: u * float(u.detach()[0, 0]),
    ],
    ids=["if", "item", "float"],
)
def test_a_branch_on_numbers_is_an_error_of_its_own(run: Callable[[Tensor], Any]) -> None:
    with pytest.raises(BranchError):
        traced(run)


def test_what_torch_cannot_trace_says_why() -> None:
    def fails(u: Tensor) -> Tensor:
        raise ValueError("not today\nnor tomorrow")

    with pytest.raises(UntraceableError, match=r"^ValueError: not today$"):
        traced(fails)


@pytest.mark.parametrize(
    ("run", "conditions"),
    [
        (lambda u: u if u.shape[0] <= 16 else -u, ("B <= 16",)),
        (lambda u: u if u.shape[0] % 2 else -u, ("Ne(Mod(B, 2), 0)",)),
        (lambda u: u if u.numel() < 100 else -u, ("3*B < 100",)),
        (lambda u: u if u.shape[0] > 1 else -u, ()),  # one sample is compared on its own
        (lambda u: (u.view(u.shape[0], 3, 1) * torch.ones(u.size(0), 3, 2)).flatten(1) / u.shape[0], ()),
        (lambda u: u if u.shape[1] < 9 else -u, ()),
    ],
)
def test_conditions_on_the_number_of_samples_are_found_with_symbols(
    run: Callable[[Tensor], Tensor], conditions: tuple[str, ...]
) -> None:
    assert traced(run, symbolic=True).conditions == conditions
    assert traced(run).conditions == ()


def test_programs_tell_two_computations_apart() -> None:
    def run(factor: float, more: bool = False) -> Callable[[Tensor], Tensor]:
        # A result that nothing uses is no part of the program.
        return lambda u: (u.sin() if more else None, u.exp() * factor + torch.tensor(factor))[1]

    one, twin, other = traced(run(2.0)), traced(run(2.0, True)), traced(run(3.0))
    assert one.program == twin.program != other.program and one.operations == other.operations
    assert "exp" in one.operations
