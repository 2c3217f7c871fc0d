"""``__torch_function__`` for the public functions: torch.fx proxies, tensor subclasses and modes can replace them."""

from collections.abc import Callable
from typing import Any

from torch.overrides import handle_torch_function


def instead(function: Callable[..., Any], given: dict[str, Any], by_position: int) -> Any:
    """Calls ``__torch_function__`` of the arguments instead of ``function``.

    Args:
        function: the public function.
        given: ``locals()`` of the function, read before it defines anything else, so that no argument is forgotten.
            ``unknown``, the keywords that the function refuses, is left out.
        by_position: how many arguments are passed on by position, as most callers give them; the rest by name.
    """
    names = [name for name in given if name != "unknown"]
    positional = [given[name] for name in names[:by_position]]
    named = {name: given[name] for name in names[by_position:]}
    tensors = [value for value in given.values() if hasattr(type(value), "__torch_function__")]
    return handle_torch_function(function, tensors, *positional, **named)
