"""Helpful errors for code that uses :class:`capsfast.nn.Votes` as a tensor."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

OPERATORS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "matmul": "@"}
OTHERS = {"neg": "-", "getitem": "[...]", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class NoTensor:
    """Raises an error with the remedy if it is used as a tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError(_instead(f"{function.__name__}(votes)"))


def _instead(got: str) -> str:
    return (
        f"capsfast.nn.Votes: votes are not a tensor, a routing reads them by passes, got {got}; "
        f"call votes.moments(...), whose results are tensors; sizes are votes.B, votes.I, votes.J and votes.D"
    )


def _attribute(self: NoTensor, name: str) -> Any:
    if hasattr(Tensor, name):
        raise AttributeError(_instead(f"votes.{name}"))
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _operator(symbol: str) -> Callable[..., Any]:
    def operator(self: NoTensor, *others: Any) -> Any:
        raise TypeError(_instead(f"the operator {symbol}"))

    return operator


# Set here and not in the class, so that type checkers report uses of these operators.
NoTensor.__getattr__ = _attribute  # type: ignore[attr-defined]
for _name, _symbol in {**OPERATORS, **{f"r{name}": symbol for name, symbol in OPERATORS.items()}, **OTHERS}.items():
    setattr(NoTensor, f"__{_name}__", _operator(_symbol))
