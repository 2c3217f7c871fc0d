"""The state of a model before a run, to undo what the run changes."""

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .state import NAMESPACES

# The attributes of a module that hold what a forward may build.
PARTS = ("_parameters", "_buffers", "_modules")
MAPPINGS = (dict, OrderedDict, defaultdict)
# A container may hold millions of these, and they hold nothing.
ATOMS = frozenset((int, float, str, bool, bytes, type(None)))


class Snapshot:
    """The modules, tensors and containers that a model holds, and their contents, when this object is made.

    Containers are lists, mappings, sets, deques and namespaces, in attributes or in each other. Other objects of the
    user's classes and the code of scripted modules are not looked into.
    """

    def __init__(self, model: nn.Module) -> None:
        self._classes: list[tuple[Any, type]] = []  # of modules and lazy tensors, which change when they get a shape
        self._modes: list[tuple[nn.Module, bool]] = []
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._numbers: list[tuple[Tensor, Tensor]] = []
        seen: dict[int, Any] = {}
        # Scripted modules hold their parts elsewhere.
        waiting: list[Any] = [model, *model.modules(), *model.parameters(), *model.buffers()]
        while waiting:
            value = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value
                waiting += self._hold(value)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules, also those in containers."""
        return [module for module, _ in self._modes]

    def _hold(self, value: Any) -> list[Any]:
        """Holds a value, and returns what is in it."""
        if isinstance(value, Tensor):
            if nn.parameter.is_lazy(value):
                self._classes.append((value, type(value)))
            elif value.layout == torch.strided and not (value.is_meta or value.is_nested):
                self._numbers.append((value, value.detach().clone()))
            return []
        if isinstance(value, nn.Module):
            self._modes.append((value, value.training))
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            self._classes.append((value, type(value)))
            self._parts += [(vars(value)[kind], dict(vars(value)[kind])) for kind in PARTS]
            value = vars(value)
        elif isinstance(value, NAMESPACES):
            value = vars(value)
        if type(value) in MAPPINGS:
            self._contents.append((value, dict(value)))
            return [inner for inner in value.values() if type(inner) not in ATOMS]
        if type(value) in (list, set, deque):
            self._contents.append((value, list(value)))
        return [inner for inner in value if type(inner) not in ATOMS] if type(value) in (list, tuple, deque) else []

    def built(self) -> bool:
        """Whether the run added parameters, buffers or modules where nothing was, or gave lazy tensors a shape."""
        return any(type(tensor) is not kind for tensor, kind in self._classes if isinstance(tensor, Tensor)) or any(
            value is not None and before.get(name) is None for now, before in self._parts for name, value in now.items()
        )

    def keep_built(self) -> None:
        """Undoes the run. If the run built parts, only the modes of the modules are restored.

        Undoing the rest would leave parts without the flags, counts and lists that belong to them.
        """
        if self.built():
            self._restore_modes()
        else:
            self.restore()
            self._numbers = []

    def _restore_modes(self) -> None:
        for module, training in self._modes:
            module.training = training

    def restore(self) -> None:
        """Undoes the run, and removes what the run built."""
        for value, kind in self._classes:
            if type(value) is not kind:
                # Empty, as torch makes a lazy tensor.
                if isinstance(value, Tensor):
                    value.data = torch.empty(0, dtype=value.dtype, device=value.device)
                # Not by assignment, because a module may have its own __setattr__.
                object.__setattr__(value, "__class__", kind)
        for container, contents in self._contents:
            container.clear()
            container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)
        with torch.no_grad():
            for tensor, number in self._numbers:
                if tensor.shape != number.shape or tensor.dtype != number.dtype:
                    tensor.data = number.clone()
                elif not torch.equal(tensor, number):
                    tensor.copy_(number)
        self._restore_modes()


@contextmanager
def random_state_kept(model: nn.Module) -> Iterator[None]:
    """Restores the random generators of torch, Python and NumPy."""
    devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(sorted(devices)):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
