"""What the containers among the attributes of a module hold, so that it can be put back."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import nn

from .snapshot import EVERY, has_fields


class Contents:
    """Of the lists, dicts, sets and plain objects in the attributes of one module; nested ones too."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.parameters = dict(module._parameters)
        # The container itself, and a shallow copy; a reference to the object keeps its identity its own.
        self.kept = [
            (name, each, each.copy())
            for name, value in vars(module).items()
            if name not in EVERY
            for each in _containers(value, set())
        ]

    def changed(self) -> list[str]:
        """Names of the attributes of which something was added, taken away or replaced."""
        return list(dict.fromkeys(name for name, now, before in self.kept if not _same(now, before)))

    def put_back(self) -> None:
        for _, now, before in self.kept:
            if not _same(now, before):
                now.clear()
                (now.update if isinstance(now, (dict, set)) else now.extend)(before)

    @property
    def built(self) -> bool:
        """Whether parameters were made or replaced since."""
        now = self.module._parameters
        return now.keys() != self.parameters.keys() or any(now[name] is not p for name, p in self.parameters.items())


def _containers(value: Any, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    if has_fields(value):
        value = vars(value)
    if not isinstance(value, (dict, list, tuple, set, deque)):
        return
    seen.add(id(value))
    if not isinstance(value, tuple):
        yield value
    for each in [*value.values()] if isinstance(value, dict) else [*value]:
        yield from _containers(each, seen)


def _same(now: Any, before: Any) -> bool:
    """Whether both hold the same objects."""
    if len(now) != len(before):
        return False
    if isinstance(now, set):
        return bool(now == before)
    if isinstance(now, dict):
        return list(now) == list(before) and all(now[key] is each for key, each in before.items())
    return all(one is other for one, other in zip(now, before, strict=True))
