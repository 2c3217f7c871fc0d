"""Makes Triton's interpreter quick enough for the shared tests, and its products of bfloat16 right.

Nearly all of its time goes into the types of the values, not into their numbers: every addition checks and
broadcasts its operands, builds a type for the result and repeats it in 64 bits to see whether it overflowed. The types
of a kernel are few, so they are worked out once each.
"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from capsfast import toolchain


def quicken() -> None:
    if not toolchain.interpreting() or toolchain.why_no_triton():
        return
    from triton.language import core, semantic
    from triton.runtime import interpreter

    interpreter.GridExecutor.__call__ = _silent(interpreter.GridExecutor.__call__, interpreter)
    # Sizes in tests are far from where int32 ends.
    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    builder.create_dot = _dot(builder.create_dot, interpreter)
    interpreter._patch_attr = _patch_attribute(interpreter.interpreter_semantic)
    interpreter.InterpretedFunction.__call__ = _device_function(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_per_type(interpreter._get_np_dtype)
    core.block_type.__init__ = _block_type(core.block_type.__init__, core)
    core.tensor.__init__ = _tensor(core.tensor.__init__)
    operations = semantic.TritonSemantic
    operations.computation_type_impl = _computation_type(operations.computation_type_impl)
    operations.broadcast_impl_value = _broadcast(operations.broadcast_impl_value, interpreter)


def _silent(launch: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """A GPU does not warn: kernels select between values one of which may come from a division by zero."""

    def silent(*args: Any, **kwargs: Any) -> Any:
        with interpreter.np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return launch(*args, **kwargs)

    return silent


def _dot(function: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """The interpreter keeps a bfloat16 as the 16 bits of an integer, and multiplies these."""

    def widened(value: Any) -> Any:
        if value.dtype.name != "bf16":
            return value
        bits = value.data.astype(interpreter.np.uint32) << 16
        return interpreter.TensorHandle(bits.view(interpreter.np.float32), interpreter.tl.float32)

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        return function(widened(a), widened(b), *rest)

    return dot


def _device_function(patch: Callable[..., Any]) -> Callable[..., Any]:
    """A call of one device function by another patches all of triton.language again.

    A kernel's own launch has done that for the modules of capsfast; Triton's need it once.
    """
    patched = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("triton.") and self.fn not in patched:
            patched.add(self.fn)
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    return call


def _patch_attribute(semantic: Any) -> Callable[..., None]:
    """Without a wrapper around the wrapper around each function of triton.language."""

    def patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(owner, name, call)

    return patch_attribute


def _once_per_type(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def dtype(of: Any) -> Any:
        if of.name not in known:
            known[of.name] = function(of)
        return known[of.name]

    return dtype


def _block_type(init: Callable[..., None], core: Any) -> Callable[..., None]:
    known: dict[Any, dict[str, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if isinstance(shape, core.tuple) else shape
        key = (element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in sizes))
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])

    return block_type


def _tensor(init: Callable[..., None]) -> Callable[..., None]:
    known: dict[str, Any] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known[type.name]

    return tensor


def _computation_type(function: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def computation_type(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, division: bool) -> Any:
        key = (a.name, a_is_scalar, b.name, b_is_scalar, division)
        if key not in known:
            known[key] = function(self, a, a_is_scalar, b, b_is_scalar, division)
        return known[key]

    return computation_type


def _broadcast(function: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    known: dict[tuple[str, str], Any] = {}

    def widened(self: Any, value: Any, target: Any) -> Any:
        if value.type.name == target.name:
            return value
        data = interpreter.np.broadcast_to(value.handle.data, target.shape.values)
        return self.tensor(interpreter.TensorHandle(data, target.scalar), target)

    def broadcast(self: Any, a: Any, b: Any) -> Any:
        key = (a.type.name, b.type.name)
        if key not in known:
            known[key] = tuple(value.type for value in function(self, a, b))
        return widened(self, a, known[key][0]), widened(self, b, known[key][1])

    return broadcast
