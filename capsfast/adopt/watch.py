"""Finds modules of a model that may be routing layers, by shapes of inputs, outputs and parameters."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from ..environment.names import ours
from . import structures
from .calls import Signature
from .fused import FusedLayer, autocast_of
from .snapshot import Snapshot, random_state_kept
from .state import LeftAloneError

# A module that holds one of these does more than route; a module inside it may be the layer.
NO_ROUTING = (
    *(nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding, nn.EmbeddingBag, nn.RNNBase),
    *(nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.modules.pooling._MaxPoolNd),
)

REGISTRATIONS = (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
    register_module_buffer_registration_hook,
)


@dataclass
class Candidate:
    """A module that may be a routing layer, and its first call in the model.

    Attributes:
        shapes: shapes of its input and output.
        autocast: the dtype of autocast around the call, None if it was off.
        signature: the signature of the call. given: copies of its arguments, capsules or votes first.
        why_not: the reason, if the call already shows that the layer can't be fused.
        name: the name in the model; ``nameless`` if the model has no such module.
        around: the modules that called it, outermost first.
    """

    layer: nn.Module
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    autocast: torch.dtype | None
    name: str = ""
    nameless: bool = False
    signature: Signature | None = None
    given: tuple[Any, ...] = ()
    why_not: str = ""
    around: tuple[nn.Module, ...] = ()

    @property
    def device(self) -> str:
        return self.given[0].device.type if self.given else "cpu"


def candidates(model: nn.Module, example: object, before: Snapshot) -> list[Candidate]:
    """Modules whose calls look like routing, outer modules first. Runs the model in evaluation mode."""
    by_layer: dict[nn.Module, Candidate] = {}
    running: list[nn.Module] = []
    # A hook on a module inside a fused layer would make the layer run its own forward.
    inside = {module for fused in model.modules() if isinstance(fused, FusedLayer) for module in fused.modules()}
    watched = {module for module in inside if not isinstance(module, FusedLayer)}
    handles: list[RemovableHandle] = []
    thread = threading.get_ident()

    def watch(module: nn.Module) -> None:
        for inner in module.modules():
            if inner not in watched and _may_route(inner):
                watched.add(inner)
                handles.append(inner.register_forward_pre_hook(enter))
                handles.append(inner.register_forward_hook(see, with_kwargs=True))

    def register(module: nn.Module, name: str, value: object) -> None:
        if threading.get_ident() == thread:
            watch(value if isinstance(value, nn.Module) else module)

    def enter(layer: nn.Module, args: Any) -> None:
        if threading.get_ident() == thread:
            running.append(layer)

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread:  # a replica of DataParallel
            return
        while layer in running and running.pop() is not layer:  # a call that failed, whose error the model caught
            pass
        u = next((tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)), None)
        results = [
            tensor for tensor in (output if isinstance(output, tuple) else (output,)) if isinstance(tensor, Tensor)
        ]
        likely = [result for result in results if u is not None and looks_like_routing(u, result)]
        if u is None or not likely or layer in by_layer:
            return
        v = max(likely, key=lambda tensor: tensor.dim() > 2)  # rather capsules than their lengths
        candidate = by_layer[layer] = Candidate(layer, (tuple(u.shape), tuple(v.shape)), autocast_of(u))
        candidate.around = tuple(running)
        try:
            candidate.signature, candidate.given = Signature.of(layer, args, kwargs)
        except LeftAloneError as error:
            candidate.why_not = str(error)

    try:
        for module in before.modules:
            watch(module)
        # The run may build modules, or call modules that it makes each time.
        handles += [registration(register) for registration in REGISTRATIONS]
        # Compiled parts run eagerly: a hook inside one would compile it again.
        with random_state_kept(model), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()
            if isinstance(example, Mapping):
                model(**example)
            else:
                model(*example) if isinstance(example, tuple) else model(example)
    finally:
        for handle in handles:
            handle.remove()
    before.keep_built()
    ordered = []
    named = {module: name for name, module in model.named_modules()}
    nameless = sorted(
        (layer for layer in by_layer if layer not in named), key=lambda layer: len(by_layer[layer].around)
    )
    for module in (*named, *nameless):
        inner = [by_layer[part] for part in module.modules() if part is not module and part in by_layer]
        # Around a layer of capsfast there is nothing to fuse.
        around = not ours(type(module)) and any(
            ours(type(candidate.layer)) and _routes(candidate) for candidate in inner
        )
        if module in by_layer and not around and _routes(by_layer[module]):
            by_layer[module].name, by_layer[module].nameless = named.get(module, ""), module not in named
            ordered.append(by_layer[module])
    return ordered


def _may_route(module: nn.Module) -> bool:
    # A parametrization replaces the module's own class by a subclass that is defined in torch.
    kind = type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)
    return not kind.__module__.startswith("torch.") and not isinstance(module, torch.jit.ScriptModule)


def axes_of(shape: Sequence[int]) -> list[int]:
    """Lengths of the axes, without lengths 1."""
    return [size for size in shape if size != 1]


def looks_like_routing(u: Tensor, v: Tensor) -> bool:
    """Whether shapes can be ``[B, I, K]`` or votes ``[B, I, J, D]`` to ``[B, J, D]``, in any order of axes.

    Further axes of length 1 do not count.
    """
    if not (u.is_floating_point() and v.is_floating_point()) or u.dim() < 3 or u.numel() == 0:
        return False
    B = u.shape[0]
    sizes_in, sizes_out = axes_of(u.shape[1:]), axes_of(v.shape)
    if B != 1:
        if B not in sizes_out:
            return False
        sizes_out.remove(B)
    return len(sizes_out) in (1, 2) and len(sizes_in) in (1, 2, 3)


def _routes(candidate: Candidate) -> bool:
    """Whether a tensor of the layer can be the weight by its shape, or its input can be votes."""
    layer = candidate.layer
    if isinstance(layer, FusedLayer):
        return True
    if any(isinstance(module, NO_ROUTING) for module in layer.modules()):
        return False
    shapes = {
        tuple(tensor.shape) for tensor in (*layer.parameters(), *layer.buffers()) if len(axes_of(tensor.shape)) > 1
    }
    for shape in shapes:
        for call in structures.calls("", shape, *candidate.shapes):
            # A shared weight with I = J is probably a linear layer or attention, not routing.
            if set("IJ") & set(call.weight_order) or call.sizes.I != call.sizes.J:
                return True
    votes = () if any(len(axes_of(shape)) > 2 for shape in shapes) else structures.calls(None, (), *candidate.shapes)
    return any(call.sizes.I > 1 for call in votes)
