"""What every routing op needs beside its kernels: autocast, vmap and the error of a second derivative."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("capsfast", "FRAGMENT")


def register(
    name: str,
    fake: Callable[..., Any],
    fake_backward: Callable[..., Any],
    save: Callable[..., None],
    backward: Callable[..., Any],
    cast: Sequence[int],
) -> None:
    """Completes ``capsfast::name`` and ``capsfast::name_backward``, whose kernels the extension holds.

    save, backward: the autograd glue (setup_context and backward). cast: the positions of the
    arguments that autocast casts.
    """
    op = f"capsfast::{name}"
    torch.library.register_fake(op, fake)
    torch.library.register_fake(f"{op}_backward", fake_backward)
    torch.library.register_autograd(op, backward, setup_context=save)
    torch.library.register_autograd(f"{op}_backward", _second_derivative(name))
    for overload in (op, f"{op}_backward"):
        torch.library.register_vmap(overload, _vmap(_overload(overload)))
    for device in ("cpu", "cuda"):
        _register_autocast(name, device, cast)


def functional(name: str, save: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """``capsfast::name``, also under torch.func: ops registered in torch.library have no rule for its grad.

    Outside of torch.func transforms this is the op itself; inside, the same glue as an autograd.Function.
    """

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return _overload(f"capsfast::{name}")(*inputs)

        setup_context = staticmethod(save)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
            return _vmap(Transformed.apply)(info, in_dims, *inputs)

    Transformed.backward = staticmethod(backward)  # type: ignore[assignment]

    def call(*inputs: Any) -> Any:
        if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
            return Transformed.apply(*inputs)
        return _overload(f"capsfast::{name}")(*inputs)

    return call


def functional_backward(name: str) -> Callable[..., Any]:
    """``capsfast::name_backward``, also under torch.func, whose grad keeps the graph of the backward."""
    return functional(f"{name}_backward", lambda ctx, inputs, output: None, _second_derivative(name))


def _overload(qualified: str) -> Callable[..., Any]:
    namespace, name = qualified.split("::")
    return getattr(getattr(torch.ops, namespace), name).default  # type: ignore[no-any-return]


def _second_derivative(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f"capsfast.{name}: the fused backends have no second derivative; "
            f'for create_graph=True use backend="reference"'
        )

    return backward


def _register_autocast(name: str, device: str, cast: Sequence[int]) -> None:
    op = _overload(f"capsfast::{name}")

    def kernel(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        cast_args = list(args)
        for position in cast:
            tensor = args[position]
            # Like torch's own rules: float64 is left alone.
            if tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
                cast_args[position] = tensor.to(dtype)
        with torch.autocast(device, enabled=False):
            return op(*cast_args)

    _library.impl(name, kernel, "Autocast" + {"cpu": "CPU", "cuda": "CUDA"}[device])


def _vmap(op: Callable[..., Any]) -> Callable[..., Any]:
    """One call per element: the kernels batch over B themselves, so vmap is a convenience."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        calls = [
            op(*(arg if dim is None else arg.select(dim, n) for arg, dim in zip(args, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)

    return rule
