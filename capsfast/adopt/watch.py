"""Finds modules of a model that may be routing layers, by shapes of inputs, outputs and parameters."""

from collections.abc import Mapping, Sequence
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
from .state import LeftAloneError

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
        shape: shape of the output.
        autocast: the dtype of autocast around the call, None if it was off.
    """

    signature: Signature
    given: tuple[Tensor, ...]
    arguments: int
    shape: tuple[int, ...]
    autocast: torch.dtype | None


@dataclass
class Candidate:
    """A module that may be a routing layer. why_not: the reason, if its call already shows that it can't be fused."""

    name: str
    layer: nn.Module
    call: Call | None = None
    why_not: str = ""


def candidates(model: nn.Module, example: object) -> list[Candidate]:
    """Modules whose calls look like routing, outer modules first. Runs the model in evaluation mode."""
    found: dict[nn.Module, Candidate] = {}

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        u = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        results = [each for each in (output if isinstance(output, tuple) else (output,)) if isinstance(each, Tensor)]
        first = next((each for each in results if u is not None and looks_like_routing(u, each)), None)
        if u is None or first is None or layer in found:
            return
        candidate = found[layer] = Candidate("", layer)
        try:
            signature, given = Signature.of(layer, args, kwargs)
        except LeftAloneError as error:
            candidate.why_not = str(error)
            return
        given = tuple(each.detach().clone() for each in given)
        candidate.call = Call(signature, given, len(args) + len(kwargs), tuple(first.shape), autocast_of(u))

    handles = []
    try:
        # A hook on a module inside a fused layer would make the layer run its own forward.
        inside = {each for fused in model.modules() if isinstance(fused, FusedLayer) for each in fused.modules()}
        inside = {each for each in inside if not isinstance(each, FusedLayer)}
        watched = [
            each for each in model.modules() if not isinstance(each, torch.jit.ScriptModule) and each not in inside
        ]
        handles += [module.register_forward_hook(see, with_kwargs=True) for module in watched]
        # Compiled parts run eagerly: a hook inside one would compile it again.
        with preserved(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
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
        inner = [found[each] for each in module.modules() if each is not module and each in found]
        # Around a layer of capsfast there is nothing to fuse.
        around = not ours(type(module)) and any(ours(type(each.layer)) and _routes(each) for each in inner)
        if candidate is None or around or not _routes(candidate):
            candidate = Candidate("", module, why_not=_holds_a_weight(module))
        candidate.name = name
        if candidate.call or candidate.why_not:
            ordered.append(candidate)
    return ordered


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


def _routes(candidate: Candidate) -> bool:
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


def _holds_a_weight(module: nn.Module) -> str:
    """The reason to report for a module that holds a possible weight of capsules but was not seen to route; else ""."""
    if ours(type(module)):
        return ""
    for name, p in module.named_parameters(recurse=False):
        convolution = p.dim() == 4 and p.shape[2] == p.shape[3] and p.shape[3] < LARGE_KERNEL
        if len(axes_of(p.shape)) >= 4 and not convolution:
            return (
                f"it holds `{name}` {list(p.shape)}, which may be a weight of capsules, but the example did not call "
                f"it, or called its forward past it, or it was scripted, or it does something else than route; give "
                f"the routing a module of its own"
            )
    return ""
