"""Patches Triton's interpreter for the shared tests: correct products of bfloat16, and five times the speed.

The patched names are private to Triton. If a release renames one, the tests fail here, at the start.
"""

import dataclasses
import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from capsfast.environment import toolchain


def prepare() -> None:
    """Call this once a process, before the first kernel is interpreted. Does nothing if kernels are compiled."""
    if not toolchain.interpreting() or toolchain.why_no_triton():
        return
    from triton.runtime import interpreter

    from capsfast.triton import launch

    launch.WIDENED = False
    interpreter.GridExecutor.__call__ = _silent(interpreter.GridExecutor.__call__, interpreter)
    builder: Any = interpreter.interpreter_builder
    # The check would repeat every addition in 64 bits. Sizes in tests are far below the limit of int32.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    builder.create_dot = _dot(builder.create_dot, interpreter)
    interpreter.InterpretedFunction.__call__ = _device_function(interpreter._patch_lang)
    _keep_types(interpreter)


def kernels_of(function: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Names and keywords of the launches of the function, in order."""
    from triton.runtime.interpreter import GridExecutor

    found, launch = [], GridExecutor.__call__

    def remember(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append((self.fn.__name__, kwargs))
        return launch(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", remember)
        function()
    return found


def _silent(launch: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """No warnings, as on a GPU: kernels select between values, and one may come from a division by zero."""

    def silent(*args: Any, **kwargs: Any) -> Any:
        with interpreter.np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return launch(*args, **kwargs)

    return silent


def _dot(function: Callable[..., Any], interpreter: Any) -> Callable[..., Any]:
    """Widens bfloat16 first. The interpreter stores a bfloat16 as a 16-bit integer, and would multiply the integers."""

    def widened(value: Any) -> Any:
        if value.dtype.name != "bf16":
            return value
        bits = value.data.astype(interpreter.np.uint32) << 16
        return interpreter.TensorHandle(bits.view(interpreter.np.float32), interpreter.tl.float32)

    def dot(a: Any, b: Any, *rest: Any) -> Any:
        return function(widened(a), widened(b), *rest)

    return dot


def _device_function(patch: Callable[..., Any]) -> Callable[..., Any]:
    """Patches once. Each call of a device function by another would patch all of triton.language: two thirds of the
    time.

    The launch of a kernel patches the modules of capsfast; Triton's own modules need it once.
    """
    patched = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn.__module__.startswith("triton.") and self.fn not in patched:
            patched.add(self.fn)
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    return call


def _keep_types(interpreter: Any) -> None:
    """Caches types. Making the type of every result, and copying it to tensors, takes four tenths of the time."""
    core, types, tensors = interpreter.tl.core, {}, {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.__class__, element_ty.name, *map(operator.index, shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]  # shared by equal types, which nothing changes

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.__class__, type.name
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
        self.__dict__.update(tensors[key])
        self.handle, self.type = handle, type

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    # Keyed by the name of the type, which has the shape and the dtype.
    numbers, of = {}, interpreter._get_np_dtype

    def numpy_type(type: Any) -> Any:
        key = type.__class__, type.name
        if key not in numbers:
            numbers[key] = of(type)
        return numbers[key]

    interpreter._get_np_dtype = numpy_type
