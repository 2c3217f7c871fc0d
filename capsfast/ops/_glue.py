"""What all ops share: shapes of arguments, the fake of gradients, and the autograd glue."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..axes import axes_of
from ..precision import wide_dtype

if TYPE_CHECKING:
    from ._register import Contract


def check_shapes(given: Mapping[str, Tensor | None], sizes: tuple[int, int, int, int], S: Sequence[int]) -> None:
    """For fakes: the arguments beside the first, by name, against (B, I, J, D) and S, the positions."""
    symbols = dict(zip("BIJD", sizes, strict=True))
    for name, value in given.items():
        if value is None:
            continue
        axes = axes_of(name, value)
        shape = [*(symbols[axis] for axis in axes), *(S if axes[0] == "B" else ())]
        torch._check(value.dim() == len(shape), partial("{} has the wrong rank".format, name))
        for size, wanted in zip(value.shape, shape, strict=True):
            torch._check(size == wanted, partial("{} has a shape that does not fit".format, name))


def as_under_autocast(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], AbstractContextManager[Any]]:
    """For what stands in for an op: the tensors as autocast casts those of ops, and a context without autocast."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors, nullcontext()
    low = torch.get_autocast_dtype(device)
    cast = tuple(value if value.dtype == torch.float64 else value.to(low) for value in tensors)
    return cast, torch.autocast(device, enabled=False)


def in_wide_dtype(
    function: Callable[..., Sequence[Tensor]],
    inputs: tuple[Tensor, ...],
    parameters: Sequence[Tensor | None],
    narrow: Sequence[int],
) -> tuple[Tensor, ...]:
    """``function(*inputs, *parameters)`` as an op computes: 16-bit tensors become float32 before any sum.

    narrow: which results get the dtype of the inputs back. As with ops, autocast casts the inputs alone.
    """
    inputs, no_autocast = as_under_autocast(inputs)
    dtype = inputs[0].dtype
    wide = wide_dtype(dtype)
    given = (
        value.to(wide) if value is not None and value.is_floating_point() else value for value in (*inputs, *parameters)
    )
    with no_autocast:
        return tuple(value.to(dtype) if n in narrow else value for n, value in enumerate(function(*given)))


def fake_gradients(tensors: tuple[Tensor | None, ...], needed: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """A fake gradient for each tensor, empty if it is not needed."""
    anchor = tensors[0]
    assert anchor is not None
    return tuple(
        (anchor if tensor is None else tensor).new_empty(tensor.shape if wanted and tensor is not None else (0,))
        for tensor, wanted in zip(tensors, needed, strict=True)
    )


def saving(contract: "Contract") -> Callable[..., None]:
    """setup_context of an op: keeps its tensors, the outputs that the backward gets, and the options."""
    tensors, wanted = contract.tensors, len(contract.requests)
    kept = [contract.outputs.index(name) for name in contract.saved]

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors], *(output[n] for n in kept))
        ctx.options = inputs[tensors : len(inputs) - wanted]
        ctx.mark_non_differentiable(*output[contract.differentiable :])
        ctx.set_materialize_grads(False)

    return save


def backward_by(contract: "Contract", op: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The backward of an autograd formula. op: the function of the ``..._backward`` op, see _transformable()."""

    count, differentiable, may_need = contract.tensors, contract.differentiable, len(contract.needed)
    others = count - may_need + len(contract.requests)

    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        saved, options = ctx.saved_tensors, ctx.options
        received = contract.received(given[:differentiable], saved[:count], saved[count:])
        needed = ctx.needs_input_grad[:may_need]
        gradients = op(*received, *saved, *options, *needed)
        found = [g if wanted else None for g, wanted in zip(gradients, needed, strict=True)]
        return (*found, *(None,) * (others + len(options)))

    return backward
