"""Which modules of a model may be routing layers: by what goes in and comes out, and by the sizes of what they own."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .contents import Contents
from .fused import FusedLayer, autocast_of
from .signature import Signature, UnclearCallError
from .snapshot import hooked

# Of one module: more kinds of calls than a layer is given in practice.
MOST_CALLS = 4
# From this size on two equal axes at the end are rather those of capsules than of a window.
LARGE_KERNEL = 12


@dataclass
class Call:
    """One kind of call of a module, as the model made it.

    Attributes:
        signature: how; an int may mean the batch, see :meth:`Signature.readings`.
        given: copies of the tensors that went in, capsules or votes first.
        source, result: addresses of what went in and what came out, by which two calls are told to be one.
        shape: of what came out.
        autocast: the dtype of autocast around the call, None where it was off.
    """

    signature: Signature
    given: tuple[Tensor, ...]
    source: int
    result: int
    shape: tuple[int, ...]
    autocast: torch.dtype | None

    @property
    def kind(self) -> tuple[Signature, torch.dtype | None, torch.dtype]:
        return self.signature, self.autocast, self.given[0].dtype


@dataclass
class Candidate:
    """A module that may be a routing layer. why_not: where its calls already say that it cannot be fused."""

    name: str
    layer: nn.Module
    calls: list[Call] = field(default_factory=list)
    why_not: str = ""


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts back each module's mode, the buffers, what lists and the like hold, and the state of the random generators.

    What a lazy module made for its parameters stays.
    """
    modes = [(module, module.training) for module in model.modules()]
    contents = [Contents(module) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not nn.parameter.is_lazy(buffer)
    ]
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(sorted(device.index for device in devices)):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for each in contents:
            if not each.built:
                each.put_back()
        with torch.no_grad():
            for module, name, buffer, kept in buffers:
                # A scripted module gives another tensor object at each question.
                if not isinstance(module, torch.jit.ScriptModule) and module._buffers.get(name) is not buffer:
                    module._buffers[name] = buffer
                if not torch.equal(buffer, kept):
                    buffer.copy_(kept)


def run(model: nn.Module, example: object) -> Any:
    """One call of the model, whatever the example is."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def candidates(model: nn.Module, example: object) -> list[Candidate]:
    """Modules whose calls look like routing, the outer ones before those in them. Runs the model in evaluation mode."""
    found: dict[nn.Module, Candidate] = {}
    called: set[nn.Module] = set()

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        called.add(layer)
        u = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if u is None or not isinstance(first, Tensor) or not looks_like_routing(u, first):
            return
        candidate = found.setdefault(layer, Candidate("", layer))
        if len(candidate.calls) == MOST_CALLS:
            return
        try:
            signature, given = Signature.of(args, kwargs)
        except UnclearCallError as error:
            candidate.why_not = f"it is called with {error}"
            return
        call = Call(signature, given, u.data_ptr(), first.data_ptr(), tuple(first.shape), autocast_of(u))
        if all(call.kind != other.kind for other in candidate.calls):
            call.given = tuple(each.detach().clone() for each in given)
            candidate.calls.append(call)

    handles = []
    try:
        watched = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        handles += [module.register_forward_hook(see, with_kwargs=True) for module in watched]
        # Compiled parts run as they are written: a hook inside of one would compile it anew.
        with undisturbed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()
            run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    ordered = []
    for name, module in model.named_modules():
        if written_by(module).__module__.startswith("torch.") and not isinstance(module, torch.jit.ScriptModule):
            continue
        candidate = found.get(module)
        if candidate is None or not owns_what_routing_needs(candidate):
            candidate = Candidate("", module, why_not=_holds_a_weight(module, module in called))
        candidate.name = name
        if candidate.calls or candidate.why_not:
            ordered.append(candidate)
    return [each for each in ordered if not _passes_through(each, ordered) and not _is_around(each, ordered)]


def written_by(module: nn.Module) -> type:
    """Its class, without the one that a parametrization puts in front."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def axes_of(shape: tuple[int, ...]) -> list[int]:
    """Lengths of the axes that are more than one long."""
    return [size for size in shape if size != 1]


def looks_like_routing(u: Tensor, v: Tensor) -> bool:
    """``[B, I, K]`` to ``[B, J, D]``, or votes ``[B, I, J, D]`` to ``[B, J, D]``, axes of length 1 and orders aside."""
    if not (u.is_floating_point() and v.is_floating_point()) or u.dim() < 3 or u.numel() == 0:
        return False
    B = u.shape[0]
    given, made = axes_of(tuple(u.shape[1:])), axes_of(tuple(v.shape))
    if B != 1:
        if B not in made:
            return False
        made.remove(B)
    return len(made) in (1, 2) and len(given) in (1, 2, 3)


def owns_what_routing_needs(candidate: Candidate) -> bool:
    """A weight of as many numbers as ``[I, J, D, K]``, or shared by the inputs; for votes, that I is summed away."""
    if candidate.why_not:
        calls_fit = any(len(axes_of(tuple(p.shape))) >= 3 for p in candidate.layer.parameters())
        return calls_fit and not isinstance(candidate.layer, FusedLayer)
    if isinstance(candidate.layer, FusedLayer):
        return True
    return any(_is_of_capsules(candidate.layer, call) or is_of_votes(candidate.layer, call) for call in candidate.calls)


def _samples(call: Call) -> tuple[list[int], list[int]]:
    """Axes of one sample of what goes in, and of what comes out, without those of length 1."""
    B = call.given[0].shape[0]
    made = axes_of(call.shape)
    if B in made:
        made.remove(B)
    return axes_of(tuple(call.given[0].shape[1:])), made


def _is_of_capsules(layer: nn.Module, call: Call) -> bool:
    given, made = _samples(call)
    # A layer that keeps its number of capsules, as attention does, shares its weight in another sense.
    pairs = {one * other for one in given for other in made if one != other}
    sharing = {1, *given, *made, *pairs}
    numbers = math.prod(given) * math.prod(made)
    return any(
        len(axes_of(tuple(p.shape))) >= 2 and numbers % p.numel() == 0 and numbers // p.numel() in sharing
        for p in (*layer.parameters(), *layer.buffers())
        if p.numel()
    )


def is_of_votes(layer: nn.Module, call: Call) -> bool:
    given, made = _samples(call)
    owned = max((len(axes_of(tuple(p.shape))) for p in layer.parameters()), default=0)
    I, rest = divmod(math.prod(given), math.prod(made))
    return owned <= 2 and len(given) == 3 and not rest and I in given


def _passes_through(candidate: Candidate, all_of_them: list[Candidate]) -> bool:
    """Whether it hands its input to a module in it, and the output of that back: then that one is the layer."""
    inside = set(candidate.layer.modules()) - {candidate.layer}
    ends = {(call.source, call.result) for call in candidate.calls}
    return bool(ends) and any(
        other.layer in inside and ends == {(call.source, call.result) for call in other.calls} for other in all_of_them
    )


def _holds_a_weight(module: nn.Module, called: bool) -> str:
    """What to say of a module that holds what may be a weight of capsules, and does not route as far as was seen."""
    if type(module).__module__.startswith("capsfast."):
        return ""
    scripted = isinstance(module, torch.jit.ScriptModule)
    for name, p in module.named_parameters(recurse=False):
        lengths = axes_of(tuple(p.shape))
        convolution = p.dim() == 4 and p.shape[2] == p.shape[3] and p.shape[3] < LARGE_KERNEL
        if len(lengths) < 4 or convolution:
            continue
        weight = f"it holds `{name}` {list(p.shape)}, which may be a weight of capsules"
        if scripted:
            return f"{weight}, and it was scripted; accelerate the module that this was made of"
        if not called:
            return f"{weight}, and the example did not call it, or called its forward past it"
        return f"{weight}, and its forward does something else than route; give the routing a module of its own"
    return ""


def _is_around(candidate: Candidate, all_of_them: list[Candidate]) -> bool:
    """Whether all that is known of it is a weight, and a module in it may route."""
    inside = set(candidate.layer.modules()) - {candidate.layer}
    return not candidate.calls and any(other.calls and other.layer in inside for other in all_of_them)


def inner_hooks(layer: nn.Module) -> list[str]:
    """Names of the modules in the layer that something watches."""
    return [name for name, module in layer.named_modules() if name and hooked(module)]
