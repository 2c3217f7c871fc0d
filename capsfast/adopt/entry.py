"""The public function capsfast.identify: checks the arguments, then searches."""

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
from .trial import OP


def identify(
    layer: nn.Module,
    u: Tensor,
    *others: Any,
    call: Callable[..., Any] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Identification:
    """Finds the call of capsfast that computes what a routing layer computes.

    The layer is judged by what it computes, not by its name. A float64 copy runs on random numbers, and with its own
    parameters on ``u``. Its outputs and gradients are compared with :func:`capsfast.dynamic_routing`, or with
    :func:`capsfast.route_votes` if the layer takes votes. Shapes limit the possible orders of the axes of parameters,
    input and output. Votes near 0, whose coupling is equal, decide between these orders and show squash and eps.
    Tensors and arguments that the call does not read must have no effect with other numbers either. The layer, its
    mode, its gradients and the state of torch's random numbers are left unchanged.

    Args:
        layer: any module that routes ``u [B, I, K]`` or votes ``[B, I, J, D]``, in any order of axes with B first.
            DataParallel, DistributedDataParallel and a compiled wrapper are removed first, also from names.
        u: a real input; a few samples are enough.
        others: real further arguments of the forward. A tensor of 0 and 1 can be a mask, any other tensor logits. An
            int equal to the batch size may mean the batch size.
        call: ``call(layer, u, *others)``, if the layer is not called as ``layer(u, *others)``. Other values in it
            count as constants.
        output: takes the result of the layer and returns the output; default the first tensor of a tuple.

    Returns:
        :class:`capsfast.adopt.Identification`: print it, or call it. Values differ by at most 1e-10, relative; with the
        layer's own parameters on ``u``, where rounding may be amplified, values and gradients by at most 1e-8.

    Raises:
        capsfast.adopt.NotReproduced: a ValueError. No options reproduce the layer, it fails in float64, torch can't
            trace it, or its result is random, or depends on the mode, on earlier calls, or on a tensor or argument that
            the call does not read. The message gives the reason and the nearest call.
        TypeError, ValueError: layer is not a module; u is empty or not a dense float tensor with at least two axes.

    Example:
        >>> found = capsfast.identify(layer, u)  # your layer, and input capsules for it
        >>> print(found.code())
        weight = layer.weight.permute(1, 0, 2, 3)  # [J, I, D, K]
        v = capsfast.dynamic_routing(u, weight, gradient='last', squash='eps_outside')
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
    """The identification of a layer, and the search that found it.

    Raises:
        NotReproduced: capsfast has no such call.
    """
    devices = [u.device.index] if u.device.type == "cuda" else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(u.device.type, enabled=False)
        if torch.amp.is_autocast_available(u.device.type)
        else nullcontext(),
        torch.random.fork_rng(devices),
    ):
        search = Search(layer, Inputs(u.detach(), others), call, output)
        return search.result(), search
