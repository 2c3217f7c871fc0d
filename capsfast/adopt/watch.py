"""Finds modules of a model that may be routing layers, by shapes of inputs, outputs and parameters."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._names import ours
from . import structures
from .calls import Signature
from .fused import FusedLayer, autocast_of
from .probe import preserved
from .refusal import LeftAloneError

# From this size on, two equal last axes are probably axes of capsules, not of a convolution's window.
LARGE_KERNEL = 12
# A module that holds one of these does more than route; a module inside it may be the layer.
NO_ROUTING = (
    *(nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding, nn.EmbeddingBag, nn.RNNBase),
    *(nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.modules.pooling._MaxPoolNd),
)


@dataclass
class Call:
    """The first call of a module that the model made.

    Attributes:
        signature: the signature of the call. given: copies of its tensors, capsules or votes first. arguments: number
            of arguments that were passed.
        ends: addresses of the input and the output, which show that an outer module only passes a call on.
        shape: shape of the output.
        autocast: the dtype of autocast around the call, None if it was off.
    """

    signature: Signature
    given: tuple[Tensor, ...]
    arguments: int
    ends: tuple[int, int]
    shape: tuple[int, ...]
    autocast: torch.dtype | None


@dataclass
class Candidate:
    """A module that may be a routing layer. why_not: the reason, if its call already shows that it can't be fused."""

    name: str
    layer: nn.Module
    call: Call | None = None
    why_not: str = ""


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restores modes, attributes, buffers and the state of the random generators.

    Parameters that a lazy module made stay, and so do values that a forward put into a list or mapping.
    """
    modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    held = [each for module in modules for each in module._buffers.values() if each is not None]
    buffers = [(buffer, buffer.clone()) for buffer in held if not nn.parameter.is_lazy(buffer)]
    devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    try:
        with torch.random.fork_rng(sorted(devices)), preserved(model):
            yield
    finally:
        with torch.no_grad():
            for buffer, kept in buffers:
                if not torch.equal(buffer, kept):
                    buffer.copy_(kept)


def candidates(model: nn.Module, example: object) -> list[Candidate]:
    """Modules whose calls look like routing, outer modules first. Runs the model in evaluation mode."""
    found: dict[nn.Module, Candidate] = {}
    called: set[nn.Module] = set()

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        called.add(layer)
        u = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        results = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
        first = next((each for each in results if u is not None and looks_like_routing(u, each)), None)
        if u is None or first is None:
            return
        if layer in found:
            return
        candidate = found[layer] = Candidate("", layer)
        try:
            signature, given = Signature.of(layer, args, kwargs)
        except LeftAloneError as error:
            candidate.why_not = str(error)
            return
        given = tuple(each.detach().clone() for each in given)
        ends = (u.data_ptr(), first.data_ptr())
        candidate.call = Call(signature, given, len(args) + len(kwargs), ends, tuple(first.shape), autocast_of(u))

    handles = []
    try:
        # A hook on a module inside a fused layer would make the layer run its own forward.
        inside = {each for fused in model.modules() if isinstance(fused, FusedLayer) for each in fused.children()}
        inside = {module for each in inside for module in each.modules()}
        watched = [
            each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule) and each not in inside
        ]
        handles += [module.register_forward_hook(see, with_kwargs=True) for module in watched]
        # Compiled parts run eagerly: a hook inside one would compile it again.
        with undisturbed(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()
            if isinstance(example, Mapping):
                model(**example)
            else:
                model(*example) if isinstance(example, tuple) else model(example)
    finally:
        for handle in handles:
            handle.remove()
    ordered = []
    for name, module in model.named_modules():
        if _written_by(module).__module__.startswith("torch.") and not isinstance(module, torch.jit.ScriptModule):
            continue
        candidate = found.get(module)
        if candidate is None or not _owns_what_routing_needs(candidate):
            candidate = Candidate("", module, why_not=_holds_a_weight(module, module in called))
        candidate.name = name
        if candidate.call or candidate.why_not:
            ordered.append(candidate)
    return [each for each in ordered if not _passes_through(each, ordered) and not _is_around(each, ordered)]


def _written_by(module: nn.Module) -> type:
    """The class of a module, without the subclass that a parametrization makes."""
    kind = type(module)
    return kind.__bases__[0] if parametrize.is_parametrized(module) else kind


def axes_of(shape: Sequence[int]) -> list[int]:
    """Lengths of the axes, without lengths 1."""
    return [size for size in shape if size != 1]


def looks_like_routing(u: Tensor, v: Tensor) -> bool:
    """Whether shapes can be ``[B, I, K]`` or votes ``[B, I, J, D]`` to ``[B, J, D]``, in any order, with axes of 1."""
    if not (u.is_floating_point() and v.is_floating_point()) or u.dim() < 3 or u.numel() == 0:
        return False
    B = u.shape[0]
    given, made = axes_of(u.shape[1:]), axes_of(v.shape)
    if B != 1:
        if B not in made:
            return False
        made.remove(B)
    return len(made) in (1, 2) and len(given) in (1, 2, 3)


def _owns_what_routing_needs(candidate: Candidate) -> bool:
    """Whether a tensor of the layer can be the weight by its shape, or its input can be votes."""
    layer = candidate.layer
    if isinstance(layer, FusedLayer):
        return True
    if any(isinstance(module, NO_ROUTING) for module in layer.modules()):
        return False
    tensors = [each for each in (*layer.parameters(), *layer.buffers()) if each.numel() > 1]
    if candidate.call is None:
        return any(len(axes_of(each.shape)) >= 3 for each in tensors)
    shapes = {tuple(each.shape) for each in tensors if len(axes_of(each.shape)) > 1}
    given, made = tuple(candidate.call.given[0].shape), candidate.call.shape
    for shape in shapes:
        for found in structures.calls("", shape, given, made):
            # A shared weight with I = J is probably a linear layer or attention, not routing.
            if set("IJ") & set(found.weight_order) or found.sizes.I != found.sizes.J:
                return True
    votes = () if any(len(axes_of(shape)) > 2 for shape in shapes) else structures.calls(None, (), given, made)
    return any(found.sizes.I > 1 for found in votes)


def _passes_through(candidate: Candidate, all_of_them: list[Candidate]) -> bool:
    """Whether a module only passes its input to an inner module and returns its output: the inner one is the layer."""
    inside = set(candidate.layer.modules()) - {candidate.layer}
    ends = candidate.call and candidate.call.ends
    return ends is not None and any(
        other.layer in inside and other.call is not None and other.call.ends == ends for other in all_of_them
    )


def _holds_a_weight(module: nn.Module, called: bool) -> str:
    """The reason to report for a module that holds a possible weight of capsules but was not seen to route; else ""."""
    if ours(type(module)):
        return ""
    scripted = isinstance(module, torch.jit.ScriptModule)
    for name, p in module.named_parameters(recurse=False):
        lengths = axes_of(p.shape)
        convolution = p.dim() == 4 and p.shape[2] == p.shape[3] and p.shape[3] < LARGE_KERNEL
        if len(lengths) < 4 or convolution:
            continue
        weight = f"it holds `{name}` {list(p.shape)}, which may be a weight of capsules"
        if scripted:
            return f"{weight}, and it was scripted; accelerate the module before scripting it"
        if not called:
            return f"{weight}, and the example did not call it, or called its forward past it"
        return f"{weight}, and its forward does something else than route; give the routing a module of its own"
    return ""


def _is_around(candidate: Candidate, all_of_them: list[Candidate]) -> bool:
    """Whether a module only holds a possible weight while a module inside it may route."""
    inside = set(candidate.layer.modules()) - {candidate.layer}
    return candidate.call is None and any(other.call is not None and other.layer in inside for other in all_of_them)
