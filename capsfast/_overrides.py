"""What takes the place of a public function: torch.fx's proxies, subclasses of tensors, and modes of both."""

from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function


def instead(function: Callable[..., Any], given: dict[str, Any], by_position: int) -> Any:
    """``function`` as ``__torch_function__`` of its arguments makes it.

    Args:
        function: the public one.
        given: its ``locals()``, before there is anything else in them: all arguments, none of which is forgotten.
            Without ``unknown``, the keywords that it has not.
        by_position: so many are handed on by position, as callers mostly give them, the others by name.
    """
    names = [name for name in given if name != "unknown"]
    positional = [given[name] for name in names[:by_position]]
    named = {name: given[name] for name in names[by_position:]}
    tensors = [value for value in given.values() if hasattr(type(value), "__torch_function__")]
    return handle_torch_function(function, tensors, *positional, **named)
