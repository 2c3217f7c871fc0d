"""A layer's own forward and capsfast's, side by side: the same numbers, and how long they take."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..bench.timing import interleave
from . import values
from .contents import Contents
from .identification import Identification
from .signature import Signature, is_simple
from .snapshot import attributes

# The largest relative difference of a tensor that is taken for rounding, in a model of this dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Of two runs of one layer: sums whose order changes from run to run are no random numbers.
STEADY = 1e-5
TINY = 1e-30
LEAST_ROUNDS = 2

# The tensors of a call, the capsules or votes first.
Given = tuple[Tensor, ...]


class LeftAloneError(Exception):
    """Why a layer is not fused. Its text is the reason in the report."""


@dataclass(frozen=True)
class Speed:
    """Seconds of a call, medians: of the layer's own forward and of capsfast's."""

    own: float
    fused: float

    @property
    def ratio(self) -> float:
        return self.own / self.fused


class Way(nn.Module):
    """One way to compute a layer, with its tensors as inputs: no hook of the layer runs, no gradient is accumulated."""

    def __init__(self, layer: nn.Module, compute: Callable[..., Any], autocast: torch.dtype | None) -> None:
        super().__init__()
        self.layer = layer
        self.compute = compute
        self.autocast = autocast

    def forward(self, *given: Tensor) -> Any:
        with torch.autocast(given[0].device.type, enabled=self.autocast is not None, dtype=self.autocast):
            return self.compute(*given)

    def at(self, given: Given, parameters: Mapping[str, Tensor] | None = None) -> Any:
        """Of the tensors of a call, with other parameters or buffers than the layer's, by their names in it."""
        replaced = {f"layer.{name}": each for name, each in (parameters or {}).items()}
        # A forward may read one of two names of a parameter: each has numbers of its own here.
        return functional_call(self, replaced, given, tie_weights=False)


def own_way(layer: nn.Module, signature: Signature, autocast: torch.dtype | None = None) -> Way:
    def compute(*given: Tensor) -> Any:
        args, kwargs = signature.fill(*given)
        return layer.forward(*args, **kwargs)

    return Way(layer, compute, autocast)


def fused_way(layer: nn.Module, identification: Identification, autocast: torch.dtype | None = None) -> Way:
    return Way(layer, lambda *given: identification(identification.tensors(layer), *given), autocast)


def one_tensor(own: Way, given: Given, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """The output of the layer's own forward.

    Raises:
        LeftAloneError: it fails, or gives something else than a tensor.
    """
    try:
        v = own.at(given, parameters)
    except Exception as error:  # code of anybody: what it raises is the reason
        raise LeftAloneError(f"its forward failed on {list(given[0].shape)}: {first_line(error)}") from error
    if not isinstance(v, Tensor):
        many = f" of {len(v)}" if isinstance(v, (tuple, list)) else ""
        raise LeftAloneError(f"it gives a {type(v).__name__}{many}, and one tensor is understood")
    return v


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def leaves(layer: nn.Module) -> dict[str, Tensor]:
    """Copies of its parameters, each of which takes a gradient."""
    return {
        name: p.detach().clone().requires_grad_(p.is_floating_point())
        for name, p in layer.named_parameters(remove_duplicate=False)
    }


def relative(one: Tensor, other: Tensor) -> float:
    """The largest difference over the largest number of ``other``; infinite where one of them is not finite."""
    if one.numel() == 0:
        return 0.0
    one, other = one.detach().double(), other.detach().double()
    found = float((one - other).abs().max() / other.abs().max().clamp_min(TINY))
    return found if found == found else float("inf")


@contextlib.contextmanager
def mode(layer: nn.Module, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in layer.modules()]
    layer.train(training)
    try:
        yield
    finally:
        for module, kept in before:
            module.training = kept


def steady(own: Way, given: Given) -> Tensor:
    """The output, if it depends on nothing but the input, parameters and plain settings, and the call leaves no trace.

    Raises:
        LeftAloneError: it draws random numbers, differs between training and evaluation, keeps something in the layer,
            or changes its input.
    """
    outputs = []
    with torch.no_grad():
        for training in (False, False, True):
            copies = tuple(each.clone() for each in given)
            with mode(own.layer, training), unchanged(own.layer) as changed:
                outputs.append(one_tensor(own, copies).clone())
                kept = changed()
            check_kept(kept)
            if not all(torch.equal(copy, each) for copy, each in zip(copies, given, strict=True)):
                raise LeftAloneError("its forward changes its input in place")
    first, again, trained = outputs
    if first.shape != again.shape or relative(again, first) > STEADY:
        raise LeftAloneError("its output differs from call to call, as with logits that start at random")
    if first.shape != trained.shape or relative(trained, first) > STEADY:
        raise LeftAloneError("its output differs between training and evaluation, as with dropout")
    return first


def check_kept(names: list[str]) -> None:
    if names:
        raise LeftAloneError(f"its forward keeps {', '.join(names)} in the layer, which a fused one would not")


@contextlib.contextmanager
def unchanged(layer: nn.Module) -> Iterator[Callable[[], list[str]]]:
    """Gives a function that names what was changed in the layer; puts that back at the end."""
    plain = dict(attributes(layer))
    held = {name: value for name, value in plain.items() if isinstance(value, Tensor)}
    held |= dict(layer.named_buffers(remove_duplicate=False))
    copies = {name: (value._version, value.clone()) for name, value in held.items()}
    modules = dict(layer.named_modules())
    contents = {path: Contents(module) for path, module in modules.items()}

    def now() -> dict[str, Any]:
        return dict(attributes(layer)) | dict(layer.named_buffers(remove_duplicate=False))

    def changed() -> list[str]:
        after, before = now(), plain | held
        names = [name for name in after if name not in before or not _same(before[name], after[name])]
        names += [name for name, (version, _) in copies.items() if held[name]._version != version]
        names += [f"{path}.{name}" if path else name for path, each in contents.items() for name in each.changed()]
        return sorted({*names, *(name for name in before if name not in after)})

    try:
        yield changed
    finally:
        with torch.no_grad():
            for name in changed():
                path, _, attribute = name.rpartition(".")
                module = modules[path]
                if name in copies and held[name]._version != copies[name][0]:
                    held[name].copy_(copies[name][1])
                if name in plain or name in held:
                    setattr(module, attribute, (plain | held)[name])
                else:
                    delattr(module, attribute)
            for each in contents.values():
                each.put_back()


def _same(before: object, after: object) -> bool:
    return before is after or (is_simple(before) and is_simple(after) and before == after)


def depends_on(own: Way, given: Given, names: tuple[str, ...]) -> list[str]:
    """Tensors of the layer, beside those of ``names``, whose numbers its output depends on."""
    layer = own.layer
    held = dict(layer.named_parameters(remove_duplicate=False)) | dict(layer.named_buffers(remove_duplicate=False))
    found = []
    with torch.no_grad():
        before = one_tensor(own, given)
        for name, value in held.items():
            others = values.others(value) if name not in names and value.numel() else ()
            if any(_moves(before, own, given, {name: other}) for other in others):
                found.append(name)
        for name, value in list(attributes(layer)):
            if isinstance(value, Tensor) and value.numel() and name not in names:
                path, _, attribute = name.rpartition(".")
                module = layer.get_submodule(path)
                try:
                    for other in values.others(value):
                        setattr(module, attribute, other)
                        if _moves(before, own, given):
                            found.append(name)
                            break
                finally:
                    setattr(module, attribute, value)
    return found


def _moves(before: Tensor, own: Way, given: Given, parameters: Mapping[str, Tensor] | None = None) -> bool:
    try:
        after = one_tensor(own, given, parameters)
    except LeftAloneError:  # with other numbers it does not even run
        return True
    return after.shape != before.shape or relative(after, before) > STEADY


def check_masks(own: Way, fused: Way, given: Given, identification: Identification) -> None:
    """capsfast takes a number for True unless it is 0, and gives 0 where nothing is left.

    Raises:
        LeftAloneError: the layer takes it for more than that, or gives something else.
    """
    with torch.no_grad():
        before = one_tensor(own, given)
        for n, role in enumerate(identification.arguments, 1):
            if not role.endswith("mask"):
                continue
            empty = (*given[:n], torch.zeros_like(given[n]), *given[n + 1 :])
            expected = one_tensor(own, empty)
            if expected.isfinite().all() and relative(one_tensor(fused, empty), expected) > STEADY:
                raise LeftAloneError(
                    f"where its {role} is False for a whole sample it gives something else than 0, as capsfast does"
                )
            if given[n].dtype != torch.bool:
                for other in values.truths(given[n]):
                    if _moves(before, own, (*given[:n], other, *given[n + 1 :])):
                        raise LeftAloneError(
                            f"its {role} of {given[n].dtype} is a factor, or compared with a number, and capsfast's is "
                            f"either True or False; call it with a bool".replace("torch.", "")
                        )


def difference(own: Way, fused: Way, given: Given, roles: tuple[str, ...] = ()) -> float:
    """The largest relative difference of output and gradients: of capsules or votes, of logits, of all parameters.

    Raises:
        LeftAloneError: the outputs have other shapes or dtypes.
    """
    results: list[list[Tensor]] = []
    for way in (own, fused):
        parameters = leaves(own.layer)
        wanted = [0, *(n for n, role in enumerate(roles, 1) if role == "logits")]
        copies = tuple(each.detach().clone().requires_grad_(n in wanted) for n, each in enumerate(given))
        with torch.enable_grad():
            v = one_tensor(way, copies, parameters)
        if results and v.shape != results[0][0].shape:
            raise LeftAloneError(f"it gives {list(results[0][0].shape)}, the fused call {list(v.shape)}")
        if results and v.dtype != results[0][0].dtype and own.autocast is None:
            raise LeftAloneError(f"it gives {results[0][0].dtype}, the fused call {v.dtype}".replace("torch.", ""))
        dv = torch.randn(v.shape, generator=torch.Generator().manual_seed(v.numel())).to(v)
        inputs = [each for each in (*copies, *parameters.values()) if each.requires_grad]
        found = torch.autograd.grad(v, inputs, dv, allow_unused=True, materialize_grads=True)
        results.append([v.detach(), *found])
    return max(relative(one, other) for one, other in zip(results[1], results[0], strict=True))


def other_batch(given: Given, roles: tuple[str, ...]) -> Given:
    """Random numbers of the size of those that are given, for another number of samples; masks lose some entries."""
    B = 2 if given[0].shape[0] == 3 else 3
    generator = torch.Generator().manual_seed(B)
    numbers = []
    for n, each in enumerate(given):
        rows = each[torch.arange(B, device=each.device) % each.shape[0]]
        drawn = torch.rand(rows.shape, generator=generator).to(each.device)
        if n and roles[n - 1].endswith("mask"):
            kept = drawn < 0.7
            kept[..., 0] = True
            rows = rows * kept
        elif each.is_floating_point():
            wide = each.double()
            rows = ((drawn - 0.5) * 12**0.5 * wide.std() + wide.mean()).to(each.dtype)
        numbers.append(rows)
    return tuple(numbers)


def verified(
    own: Way, fused: Way, signature: Signature, given: Given, roles: tuple[str, ...], tolerance: float | None
) -> tuple[Signature, float]:
    """The calls that may be fused, and the largest difference.

    Raises:
        LeftAloneError: it differs by more than the tolerance.
    """
    found = difference(own, fused, given, roles)
    others = other_batch(given, roles)
    try:
        one_tensor(own, others)
    except LeftAloneError:  # one number of samples is all it takes
        signature = replace(signature, batch=given[0].shape[0])
    else:
        found = max(found, difference(own, fused, others, roles))
    dtype = own.autocast or given[0].dtype
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    if not found <= limit:
        kind = str(dtype).removeprefix("torch.")
        raise LeftAloneError(f"capsfast's call differs from it by {found:.1e} in {kind}; the tolerance is {limit:.0e}")
    return signature, found


def speeds(own: Way, fused: Way, given: Given, seconds: float) -> tuple[Speed, Speed]:
    """Of forward, and of forward and backward; own and fused take turns for so many seconds."""
    parameters = leaves(own.layer)
    copies = (given[0].detach().clone().requires_grad_(), *given[1:])
    inputs = [each for each in (*copies, *parameters.values()) if each.requires_grad]

    def forward(way: Way) -> None:
        with torch.no_grad():
            way.at(copies, parameters)

    def both(way: Way) -> None:
        with torch.enable_grad():
            torch.autograd.grad(way.at(copies, parameters).sum(), inputs, allow_unused=True)

    def measure(run: Callable[[Way], None]) -> Speed:
        steps = {"own": lambda _: run(own), "fused": lambda _: run(fused)}
        timings = interleave(steps, given[0].device, seconds, LEAST_ROUNDS)
        return Speed(timings["own"].median, timings["fused"].median)

    return measure(forward), measure(both)
