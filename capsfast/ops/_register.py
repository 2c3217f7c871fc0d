"""Defines the ops: schema, fake, autograd, autocast, vmap, sharding. The kernels are elsewhere.

There are two ops with the same contract, one per set of kernels: ``capsfast::<op>`` for those of the extension,
``capsfast::triton_<op>`` for those of Triton. So a traced program keeps the kernels it was traced with.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd import forward_ad

from .. import native as native  # loads the extension, which defines ops
from . import _sharding
from ._glue import backward_by, saving

PREFIX = {"cpp": "", "triton": "triton_"}

MASKS = ("mask", "out_mask")
_library = torch.library.Library("capsfast", "FRAGMENT")

Received = Callable[[Sequence[Tensor | None], Sequence[Tensor | None], Sequence[Tensor]], Sequence[Tensor | None]]


class Contract(NamedTuple):
    """What an op takes and returns.

    inputs: names of its first arguments, which are tensors. parameters: names of the float tensors that follow, each of
    which may be None; the two masks come after them. options: the options as in the schema. requests: names of bools
    that ask for an output, at the end. outputs: names of the results, the first ``differentiable`` of which have
    gradients. saved: those that the backward gets. fake, fake_backward: functions that give the shapes and dtypes of
    the results. received(gradients of outputs, tensors, saved outputs): the gradients as the backward takes them.
    optional: which gradients of outputs the backward takes as None. called: the public function that errors name,
    where it has another name. cast: how many of the first arguments autocast casts; None for the inputs.
    """

    name: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    options: str
    requests: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: int
    saved: tuple[str, ...]
    optional: tuple[str, ...]
    fake: Callable[..., Any]
    fake_backward: Callable[..., Any]
    received: Received
    called: str = ""
    cast: int | None = None

    @property
    def autocast(self) -> int:
        return len(self.inputs) if self.cast is None else self.cast

    @property
    def public(self) -> str:
        """What the user called."""
        return f"capsfast.{self.called or self.name}"

    @property
    def tensors(self) -> int:
        """How many arguments of the forward are tensors or None. They come first."""
        return len(self.needed) + len(MASKS)

    @property
    def needed(self) -> tuple[str, ...]:
        """What may need a gradient."""
        return (*self.inputs, *self.parameters)

    @property
    def first_option(self) -> str:
        """The name of the first argument that is no tensor."""
        return self.options.split(",")[0].split()[1]

    def schemas(self, prefix: str) -> tuple[str, str]:
        tensors = ", ".join(
            [f"Tensor {name}" for name in self.inputs] + [f"Tensor? {name}" for name in (*self.parameters, *MASKS)]
        )
        gradients = ", ".join(
            f"Tensor{'?' if name in self.optional else ''} d{name}" for name in self.outputs[: self.differentiable]
        )
        saved = ", ".join(f"Tensor {name}" for name in self.saved)
        requests = ", ".join(f"bool return_{name}" for name in self.requests)
        needed = ", ".join(f"bool need_{name}" for name in self.needed)
        return (
            f"{prefix}{self.name}({_joined(tensors, self.options, requests)}) -> ({_tensors(self.outputs)})",
            f"{prefix}{self.name}_backward({_joined(gradients, tensors, saved, self.options, needed)}) "
            f"-> ({_tensors(self.needed)})",
        )


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _tensors(names: tuple[str, ...]) -> str:
    return ", ".join("Tensor" for _ in names)


def define(contract: Contract, sharded: bool = True) -> dict[str, Callable[..., Any]]:
    """The op as a function for each backend. cpp and cuda are one op, which has a kernel for each device.

    sharded: it has rules for DTensors.
    """
    ops = {backend: _define(contract, backend, sharded) for backend in PREFIX}
    return {**ops, "cuda": ops["cpp"]}


def define_cpp(contract: Contract) -> Callable[..., Any]:
    """An op that has kernels on the CPU alone, and no rules for DTensors."""
    return _define(contract, "cpp", sharded=False)


def _define(contract: Contract, backend: str, sharded: bool = True) -> Callable[..., Any]:
    name = PREFIX[backend] + contract.name
    op = f"capsfast::{name}"
    for defined, schema in zip((name, f"{name}_backward"), contract.schemas(PREFIX[backend]), strict=True):
        # The extension defines its own (csrc/ops/schemas.h), for processes without Python.
        if not hasattr(torch.ops.capsfast, defined):
            _library.define(schema)
    if backend == "triton":
        _bind_triton(contract.name)
    second, jvp = _second_derivative(contract.public), _forward_mode(contract.public)
    fused_backward = _transformable(
        f"{name}_backward", contract.public, _keep_nothing, second, jvp, 0, contract.differentiable
    )
    backward = backward_by(contract, fused_backward)
    save = saving(contract)
    torch.library.register_fake(op, contract.fake)
    torch.library.register_fake(f"{op}_backward", contract.fake_backward)
    torch.library.register_autograd(op, backward, setup_context=save)
    torch.library.register_autograd(f"{op}_backward", second)
    for overload in (op, f"{op}_backward"):
        torch.library.register_vmap(overload, _vmap(_overload(overload)))
    for device in ("cpu", "cuda"):
        _register_autocast(name, device, contract.autocast)
    if sharded:
        _sharding.announce(contract, _overload(op), _overload(f"{op}_backward"))
    return _transformable(name, contract.public, save, backward, jvp, contract.autocast)


def _bind_triton(name: str) -> None:
    """Registers the Triton kernels. Triton is imported at the first call. On CPU tensors only its interpreter runs."""

    imported = functools.cache(lambda: importlib.import_module(f"capsfast.triton.{name}"))

    def bound(function: str) -> Callable[..., Any]:
        def kernel(*args: Any) -> Any:
            return getattr(imported(), function)(*args)

        return kernel

    for key in ("CPU", "CUDA"):
        _library.impl(f"triton_{name}", bound("forward"), key)
        _library.impl(f"triton_{name}_backward", bound("backward"), key)


def _transformable(
    name: str,
    public: str,
    save: Callable[..., None],
    backward: Callable[..., Any],
    jvp: Callable[..., Any],
    cast: int,
    first: int = 0,
) -> Callable[..., Any]:
    """A function that calls ``capsfast::name`` in the way that suits its caller.

    Under torch.compile and autocast it calls the op itself. torch.func cannot differentiate ops registered with
    torch.library, and in eager mode their autograd takes most of the host time of a call. In both cases save and
    backward run in an autograd.Function instead. public: the function that errors name. cast: how many of the first
    arguments autocast casts. first: which argument is surely a tensor, as the gradients before it may be None.
    """
    op = _overload(f"capsfast::{name}")

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        setup_context = staticmethod(save)

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
            return _vmap(Transformed.apply)(info, in_dims, *inputs)

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            save(ctx, inputs, output)
            return output

    for function in (Transformed, Eager):
        function.backward = staticmethod(backward)  # type: ignore[assignment]
        function.jvp = staticmethod(jvp)  # type: ignore[assignment]

    def call(*inputs: Any) -> Any:
        if type(inputs[0]) is not Tensor:
            _sharding.register_if_imported()
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return op(*inputs)
        try:
            casting = torch._C._is_any_autocast_enabled()
            if casting:
                device = inputs[first].device.type
                casting = device != "meta" and torch.is_autocast_enabled(device)
            if torch._C._are_functorch_transforms_active():
                if not casting:
                    return Transformed.apply(*inputs)
                with torch.autocast(device, enabled=False):
                    return Transformed.apply(*_cast(inputs, torch.get_autocast_dtype(device), cast))
            if casting:
                return op(*inputs)
            # Under forward-mode differentiation the Function raises an error. The op would silently drop the tangent.
            differentiated = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in inputs)
            if differentiated or forward_ad._current_level >= 0:
                return Eager.apply(*inputs)
            with torch._C._AutoDispatchBelowAutograd():
                return op(*inputs)
        except (RuntimeError, MemoryError) as error:
            # What torch makes of a std::bad_alloc: one or the other, by release.
            if not str(error).startswith("std::bad_alloc"):
                raise
            raise MemoryError(
                f"{public}: the system has no memory for the scratch of this call ({error}); "
                "take a smaller batch or fewer threads (torch.set_num_threads)"
            ) from None

    return call


def _cast(args: Sequence[Any], dtype: torch.dtype, count: int) -> list[Any]:
    """args, the first ``count`` of them cast to dtype. float64 is not cast, as in torch's own autocast rules."""
    low = (torch.float32, torch.float16, torch.bfloat16)
    return [arg.to(dtype) if n < count and arg.dtype in low else arg for n, arg in enumerate(args)]


def _keep_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    pass


def _overload(qualified: str) -> OpOverload:
    namespace, name = qualified.split("::")
    return getattr(getattr(torch.ops, namespace), name).default  # type: ignore[no-any-return]


def _second_derivative(public: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            f'{public}: the fused backends have no second derivative; for create_graph=True use backend="reference"'
        )

    return backward


def _forward_mode(public: str) -> Callable[..., Any]:
    def jvp(ctx: Any, *tangents: Tensor | None) -> None:
        raise NotImplementedError(
            f"{public}: the fused backends have no forward-mode derivative (jvp), got an argument with a tangent; "
            f'use backend="reference"'
        )

    return jvp


def _register_autocast(name: str, device: str, cast: int) -> None:
    op = _overload(f"capsfast::{name}")

    def kernel(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return op(*_cast(args, torch.get_autocast_dtype(device), cast))

    _library.impl(name, kernel, "Autocast" + {"cpu": "CPU", "cuda": "CUDA"}[device])


def _vmap(op: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule that makes one call per element. It is only a convenience: the kernels batch over B themselves."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        calls = [
            op(*(arg if dim is None else arg.select(dim, n) for arg, dim in zip(args, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)

    return rule
