"""Defines the ops: schema, fake, autograd, autocast, vmap, sharding, and the kernels of a call.

Each set of kernels has its own op, with the same contract: ``capsfast::<op>`` for the extension's kernels,
``capsfast::triton_<op>`` for the Triton kernels. So a traced program keeps the kernels it was traced with.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..backend import BACKENDS, REFERENCE, choose
from ..calls import checks, replay
from ..calls.arguments import Call
from ..calls.axes import axes_of
from ..calls.positions import from_samples
from ..calls.precision import cast, in_wide_dtype, tf32_allowed
from ..environment import native
from ..environment.names import NAMESPACE, PACKAGE
from ..environment.private_torch import (
    OpOverload,
    any_autocast,
    below_autograd,
    forward_level,
    tracing_state,
    transformed,
    turns_tensors_into_handles,
)
from . import flops, sharding
from .contract import Contract

# The remedy for a call that does not fit in memory.
SMALLER = "take a smaller batch, or fewer threads (torch.set_num_threads)"
# The prefix of an op's name, by the backend that serves the op. One op has both the CPU and the CUDA kernels.
TRITON = "triton_"
PREFIX = {"cpp": "", "triton": TRITON, "cuda": ""}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_ops = getattr(torch.ops, NAMESPACE)

Function = Callable[..., Any]
Outputs = tuple[Tensor, ...]


class Op:
    """An op of routing with its kernels.

    kernels: for each backend with kernels, a function that takes the arguments of the schema.

    Args:
        name: the op's name in schemas.inc.
        public: the public function that errors name; a second name, if there is one, is for calls without a weight.
        fake: gives shapes and dtypes of the results; called with a namespace of the arguments.
        cast: number of arguments that autocast casts, counted from the first argument.
        definition: the reference: takes a :class:`capsfast.calls.arguments.Call` without positions, returns what the
            public function returns.
        narrow: takes the options and returns the indices of the results with the dtype of u; the others, sums, are
            float32 for 16-bit inputs.
        flops: the formulas of FlopCounterMode for the op and its backward (see flops.py). Without them it counts 0,
            which is right for an op without contractions.
        sharded: whether the op has sharding rules for DTensors.
        backends: the backends that have kernels of the op.
    """

    def __init__(
        self,
        name: str,
        public: tuple[str, ...],
        fake: Function,
        *,
        cast: int = 2,
        definition: Callable[[Call], Outputs] | None = None,
        narrow: Callable[[Any], Sequence[int]] = lambda options: (),
        flops: tuple[flops.Formula, flops.Formula] | None = None,
        sharded: bool = True,
        backends: Sequence[str] = tuple(PREFIX),
    ) -> None:
        self.contract = Contract(name)
        self.public, self.fake, self.cast, self.sharded = public, fake, cast, sharded
        self.definition, self.narrow, self.flops = definition, narrow, flops
        by_prefix = {prefix: self.define(prefix) for prefix in dict.fromkeys(map(PREFIX.__getitem__, backends))}
        self.kernels: dict[str, Function] = {backend: by_prefix[PREFIX[backend]] for backend in backends}
        if TRITON in by_prefix:
            _bind_triton(self.contract)

    def run(self, call: Call, requests: tuple[bool, ...], backend: str | None) -> Outputs:
        """The results of the op from the chosen backend. A result that was not requested is empty."""
        chosen = choose(call, backend, requests[0])
        if chosen == REFERENCE:
            remedy = "take a smaller batch, or a backend that stores no votes"
            return checks.in_memory(call.op, remedy, self.run_definition, call, requests)  # type: ignore[no-any-return]
        J = call.J if call.weight is None else None
        tf32 = BACKENDS[chosen].rounds and tf32_allowed()
        outputs: Outputs = self.kernels[chosen](
            call.u, call.weight, *call.parameters, J, *call.options, tf32, *requests
        )
        return outputs

    def run_definition(self, call: Call, requests: tuple[bool, ...]) -> Outputs:
        """The results of the op from its definition."""
        assert self.definition is not None
        outputs = in_wide_dtype(self.definition, call.as_samples(), self.narrow(call.options))
        if call.weight is None and call.u.dim() == 5:
            B, S = call.u.shape[0], call.u.shape[4]
            outputs = tuple(value if value.dim() == 1 else from_samples(value, B, S) for value in outputs)
        asked = dict(zip(self.contract.arguments[-len(requests) :], requests, strict=True))
        return tuple(
            value if asked.get(f"return_{name.removesuffix('_out')}", True) else value.new_empty(0)
            for name, value in zip(self.contract.outputs, outputs, strict=False)
        )

    def define(self, prefix: str) -> Function:
        """Registers the op and its backward, and returns a function that calls the op (see :func:`_called`)."""
        contract, name = self.contract, prefix + self.contract.name
        for schema in native.SCHEMAS:
            defined = schema.split("(")[0]
            # The extension defines its own ops, because processes without Python need them.
            if defined in (contract.name, f"{contract.name}_backward") and not hasattr(_ops, prefix + defined):
                _library.define(prefix + schema)
        op, op_backward = overload(name), overload(f"{name}_backward")
        first = contract.differentiable

        def keep_name(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
            ctx.public = self.public[inputs[first + 1] is None]

        save = _saving(contract, self.public)
        option, results = contract.backward.index(contract.arguments[contract.tensors]), len(contract.needed)
        fused_backward = _called(op_backward, self.public, keep_name, _no_second_derivative, 0, first, option, results)
        backward = _backward_by(contract, fused_backward)
        torch.library.register_fake(op)(self._fake)
        torch.library.register_fake(op_backward)(self._fake_backward)
        for direction in (op, op_backward):
            torch.library.register_vmap(direction, _vmap(direction))
        for device in ("CPU", "CUDA"):
            _library.impl(name, _under_autocast(op, device.lower(), self.cast), f"Autocast{device}")
        if self.flops is not None:
            for direction, arguments, formula in zip(
                (op, op_backward), (contract.arguments, contract.backward), self.flops, strict=True
            ):
                flops.announce(direction, arguments, formula)
        if self.sharded:
            sharding.announce(contract, op, op_backward)
        return _called(op, self.public, save, backward, self.cast, 0, contract.tensors, first)

    def _fake(self, *arguments: Any) -> Any:
        return self.fake(SimpleNamespace(**dict(zip(self.contract.arguments, arguments, strict=True))))

    def _fake_backward(self, *arguments: Any) -> Outputs:
        """A gradient for each tensor, empty if it is not needed."""
        contract = self.contract
        tensors, needed = arguments[contract.differentiable :][: len(contract.needed)], arguments[-1]
        anchor = tensors[0]
        return tuple(
            (anchor if tensor is None else tensor).new_empty(tensor.shape if wanted and tensor is not None else (0,))
            for tensor, wanted in zip(tensors, needed, strict=True)
        )


def check_fake(given: Mapping[str, Tensor | None], sizes: tuple[int, int, int, int], S: Sequence[int]) -> None:
    """For fakes: checks the shapes of arguments against (B, I, J, D) and the sizes S of the positions."""
    symbols = dict(zip("BIJD", sizes, strict=True))
    for name, value in given.items():
        if value is None:
            continue
        axes = axes_of(name, value)
        shape = [*(symbols[axis] for axis in axes), *(S if axes[0] == "B" else ())]
        torch._check(value.dim() == len(shape), partial("{} has the wrong rank".format, name))
        for size, wanted in zip(value.shape, shape, strict=True):
            torch._check(size == wanted, partial("{} has a shape that does not fit".format, name))


def fake_sizes(u: Tensor, weight: Tensor | None, J: int | None) -> tuple[tuple[int, int, int, int], Sequence[int]]:
    """(B, I, J, D) and the sizes of the positions; checks that u and weight fit."""
    if weight is None:
        torch._check(u.dim() in (4, 5), lambda: "votes must be [B, I, J or 1, D] or [B, I, J, D, S]")
        B, I, J_of_votes, D = u.shape[:4]
        J = J_of_votes if J is None else J
        if J_of_votes != 1 or u.dim() == 5:
            torch._check(J_of_votes == J, lambda: "votes must have 1 or J output capsules")
        return (B, I, J, D), u.shape[4:]
    torch._check(u.dim() == 3 and weight.dim() == 4, lambda: "u must be [B, I, P K], weight [I, J, R, K]")
    torch._check(u.dtype == weight.dtype, lambda: "u and weight must have one dtype")
    (B, I, numbers), (rows, J, R, K) = u.shape, weight.shape
    P = 1 if K == 0 else numbers // K
    torch._check(P >= 1 and numbers == P * K, lambda: "u and weight must agree in K")
    if rows != 1:
        torch._check(rows == I, lambda: "weight must have 1 or I rows")
    return (B, I, J, P * R), ()


def overload(name: str) -> OpOverload:
    return getattr(_ops, name).default  # type: ignore[no-any-return]


def _bind_triton(contract: Contract) -> None:
    """Registers the Triton kernels. Triton is imported at the first call. On CPU tensors only its interpreter runs.

    With the extension, plans run without Python: the op's function is called only if a call has no plan yet.
    """
    name = contract.name
    imported = functools.cache(lambda: importlib.import_module(f"{PACKAGE}.triton.{name}"))

    def bound(function: str) -> Function:
        def kernel(*args: Any) -> Any:
            return getattr(imported(), function)(*args)

        return kernel

    for op, function, types, results in (
        (f"{TRITON}{name}", bound("forward"), contract.types, len(contract.outputs)),
        (f"{TRITON}{name}_backward", bound("backward"), contract.backward_types, len(contract.needed)),
    ):
        if native.extension is not None and turns_tensors_into_handles:
            native.extension.serve(op, types, results, function)
        else:
            for key in ("CPU", "CUDA"):
                _library.impl(op, function, key)


def _saving(contract: Contract, public: tuple[str, ...]) -> Function:
    """Saves the tensors of an op, the outputs that the backward needs, and the options."""
    tensors, last = contract.tensors, len(contract.arguments) - contract.requests
    saved = len(contract.outputs) - len(contract.saved)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
        ctx.save_for_backward(*inputs[:tensors], *output[saved:])
        ctx.options, ctx.public = inputs[tensors:last], public[inputs[1] is None]
        ctx.set_materialize_grads(False)

    return save


def _backward_by(contract: Contract, op: Function) -> Function:
    """The backward of an autograd formula. op: the function of the ``..._backward`` op."""
    may_need, differentiable = len(contract.needed), contract.differentiable

    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        # A result that was not requested is an empty vector. torch may pass zeros of this shape as its gradient.
        received = list(given[:differentiable])
        for n, g in enumerate(received):
            if g is not None and g.dim() < 2:
                received[n] = None
        needs = ctx.needs_input_grad
        gradients = op(*received, *ctx.saved_tensors, *ctx.options, list(needs[:may_need]))
        found: list[Tensor | None] = [None] * len(needs)
        for n, g in enumerate(gradients):
            if needs[n]:
                found[n] = g
        return tuple(found)

    return backward


def _called(
    op: OpOverload,
    public: tuple[str, ...],
    save: Function,
    backward: Function,
    count: int,
    first: int,
    tensors: int,
    results: int,
) -> Function:
    """Registers the autograd of an op, and returns a function that calls the op directly or in an autograd.Function.

    Under torch.compile and autocast it calls the op itself. torch.func cannot differentiate ops registered with
    torch.library, and in eager mode their autograd takes most of the host time of a call. In these two cases save and
    backward run in an autograd.Function instead.

    public: see :class:`Op`. count: number of arguments that autocast casts, counted from the first argument. first:
    index of the first argument that is always a tensor; gradients in front of this argument may be None. tensors:
    number of arguments that are tensors or None; the options follow. results: number of outputs that have gradients;
    the other outputs are for the backward.
    """

    class Transformed(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
            save(ctx, inputs, output)
            ctx.mark_non_differentiable(*output[results:])

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> Any:
            return _vmap(Transformed.apply)(info, in_dims, *inputs)

    class Eager(torch.autograd.Function):
        """Takes the options as one argument and returns no output without a gradient: torch wraps each one."""

        @staticmethod
        def forward(ctx: Any, *given: Any) -> Any:
            inputs = (*given[:-1], *given[-1])
            with below_autograd():
                output = op(*inputs) if replay.state.of_ops is None else replay.state.of_ops.result(op, inputs)
            save(ctx, inputs, output)
            return output[:results]

    for function in (Transformed, Eager):
        function.backward = staticmethod(backward)  # type: ignore[assignment]
        function.jvp = staticmethod(_no_forward_mode)  # type: ignore[assignment]
    torch.library.register_autograd(op, backward, setup_context=Transformed.setup_context)

    def call(*inputs: Any) -> Any:
        if type(inputs[first]) is not Tensor:
            sharding.register_if_imported()
        if torch.compiler.is_compiling() or tracing_state() is not None:
            return op(*inputs)
        try:
            casting = any_autocast()
            if casting:
                device = inputs[first].device.type
                casting = device != "meta" and torch.is_autocast_enabled(device)
            if transformed():
                if not casting:
                    return Transformed.apply(*inputs)
                with torch.autocast(device, enabled=False):
                    return Transformed.apply(*cast(inputs, torch.get_autocast_dtype(device), count))
            if casting:
                if replay.state.of_ops is None:
                    return op(*inputs)
                with torch.autocast(device, enabled=False):
                    return call(*cast(inputs, torch.get_autocast_dtype(device), count))
            # Under forward-mode differentiation the Function raises an error; the op would silently drop the tangent.
            differentiated = forward_level() >= 0
            if torch.is_grad_enabled():
                for value in inputs[:tensors]:
                    if value is not None and value.requires_grad:
                        differentiated = True
                        break
            if differentiated:
                return Eager.apply(*inputs[:tensors], inputs[tensors:])
            with below_autograd():
                return op(*inputs)
        except (RuntimeError, MemoryError) as error:
            # torch turns a std::bad_alloc into a RuntimeError or a MemoryError, depending on its release.
            on_gpu = inputs[first].device.type == "cuda"
            told = checks.without_memory(public[inputs[first + 1] is None], error, SMALLER, on_gpu)
            if told is None:
                raise
            raise told from None

    return call


def _under_autocast(op: OpOverload, device: str, count: int) -> Function:
    def kernel(*args: Any) -> Any:
        with torch.autocast(device, enabled=False):
            return op(*cast(args, torch.get_autocast_dtype(device), count))

    return kernel


# The remedy for users whose call capsfast.accelerate wrote.
ACCELERATED = ", or report.undo() of a model that capsfast.accelerate changed"


def _no_second_derivative(ctx: Any, *grads: Tensor) -> None:
    raise RuntimeError(
        f'{ctx.public}: the fused backends have no second derivative; for create_graph=True use backend="reference"'
        f"{ACCELERATED}"
    )


def _no_forward_mode(ctx: Any, *tangents: Tensor | None) -> None:
    raise NotImplementedError(
        f"{ctx.public}: the fused backends have no forward-mode derivative (jvp), got an argument with a tangent; "
        f'use backend="reference"{ACCELERATED}'
    )


def _vmap(op: Function) -> Function:
    """A vmap rule that makes one call per element. It is not fast: the axis B is the way to batch calls."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Outputs, tuple[int, ...]]:
        calls = [
            op(*(arg.select(dim, n) if isinstance(dim, int) else arg for arg, dim in zip(args, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        return outputs, (0,) * len(outputs)

    return rule
