"""capsfast.identify, public: check the arguments, then search."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from .identification import Identification, unwrapped
from .inputs import Inputs
from .probe import Run
from .search import Search
from .trial import OP, Float64Error


def identify(
    layer: nn.Module,
    u: Tensor,
    *others: Any,
    call: Callable[..., Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Identification:
    """Finds the call of capsfast that computes what a routing layer computes.

    The layer is taken for what it does, whatever it is called: a copy of it, in float64, runs on random numbers, on
    ``u`` and with its own parameters, and its outputs and gradients are compared with those of
    :func:`capsfast.dynamic_routing` (with :func:`capsfast.route_votes` where it takes votes). Shapes say which axes of
    its parameters, input and output can be which; votes near 0, whose coupling is equal, which of these it is, and
    which squash and eps. Whatever the call does not read, tensors of the layer and arguments, must have no effect with
    other numbers either. The layer itself, its mode, its gradients and the state of torch's random numbers stay as they
    are.

    Args:
        layer: any module that routes ``u [B, I, K]`` or votes ``[B, I, J, D]``, in any order of axes with B first. One
            inside DataParallel or DistributedDataParallel, or compiled, is taken out; names are those of the inner one.
        u: a real input; a few samples are enough.
        others: real further arguments of the forward. A tensor of 0 and 1 can be a mask, another one logits. An int
            that is the batch size is taken for that.
        call: ``call(layer, u, *others)`` where it is not called as ``layer(u, *others)``. What this passes besides
            counts as constant.
        output: which part of what it returns is meant; by default the first tensor of a tuple.

    Returns:
        :class:`capsfast.adopt.Identification`: print it, or call it. Values differ by at most 1e-10, relative; with the
        layer's own parameters on ``u``, where rounding may be amplified, values and gradients by at most 1e-8. A layer
        that cannot run in float64, or is a TorchScript one, is compared in float32: 1e-5 and 1e-3; a note says so.

    Raises:
        capsfast.adopt.NotReproduced: a ValueError. No options do it, the layer fails, or the result is random, depends
            on the mode, on what came before, or on a tensor or argument that the call does not read; the message says
            which, and which call came nearest.
        TypeError, ValueError: layer is no module, u no dense tensor of floats with at least two axes, or empty.
    """
    if not isinstance(layer, nn.Module):
        raise TypeError(f"{OP}: layer must be a torch.nn.Module, got {type(layer).__name__}")
    if not isinstance(u, Tensor):
        raise TypeError(f"{OP}: u must be a torch.Tensor, got {type(u).__name__}")
    checks.dense(OP, "u", u)
    checks.floating(OP, "u", u)
    if u.dim() < 2 or u.numel() == 0:
        raise ValueError(f"{OP}: u must be input capsules [B, I, K] or votes [B, I, J, D], got {checks.shape_of(u)}")
    found, _ = searched(unwrapped(layer), u, others, call, output)
    return found


def searched(
    layer: nn.Module, u: Tensor, others: tuple[Any, ...], call: Run | None = None, output: Run | None = None
) -> tuple[Identification, Search]:
    """What the layer computes, and the search that found it.

    Raises:
        NotReproduced: capsfast has no such call.
    """
    inputs = Inputs(u.detach(), others)
    devices = [u.device.index] if u.device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(u.device.type, enabled=False)
        if torch.amp.is_autocast_available(u.device.type)
        else nullcontext(),
        torch.random.fork_rng(devices),
    ):
        if not isinstance(layer, torch.jit.ScriptModule):
            try:
                search = Search(layer, inputs, call, output, torch.float64)
                return search.result(), search
            except Float64Error:
                # Its tensors have a dtype of their own: the comparison is coarser then.
                pass
        search = Search(layer, inputs, call, output, torch.float32)
        return search.result(), search
