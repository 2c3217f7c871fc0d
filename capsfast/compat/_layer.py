"""What the layers of this package have in common."""

from typing import Any

from torch import Tensor

from .. import checks
from ..nn import _arguments
from ..nn._called import Called

# The eps of a layer that has none: the least there is. With it zero vectors have a gradient, which they lack there.
NO_EPS = 1e-20


class CompatLayer(Called):
    """Keeps sizes as attributes under the names of the constructor, and checks them.

    Args:
        eps: of the squash.
        sizes: ints from 1.
    """

    _op: str
    # Parameters of whose checkpoints some have an axis of length 1 in front, and some not.
    _either: tuple[str, ...] = ()
    eps: float

    def __init__(self, eps: float, **sizes: int) -> None:
        super().__init__()
        _arguments.integers(self._op, **sizes)
        checks.positive_eps(self._op, eps)
        for name, value in sizes.items():
            setattr(self, name, value)
        self.eps = eps
        self._sizes = tuple(sizes)
        # Shapes of parameters in the checkpoint that was loaded, where they are not those here.
        self._saved_as: dict[str, tuple[int, ...]] = {}

    def _check_capsules(self, name: str, value: Tensor, caps: str, dim: str) -> None:
        """``[B, I, K]`` with the sizes that the attributes ``caps`` and ``dim`` say."""
        _arguments.floats(self._op, name, value, "[B, I, K]")
        wanted = (getattr(self, caps), getattr(self, dim))
        if tuple(value.shape[1:]) != wanted:
            checks.refuse_capsules(self._op, name, value, **{caps: wanted[0], dim: wanted[1]})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in self._either:
            key, own = f"{prefix}{name}", self._parameters.get(name)
            given = state_dict.get(key)
            if isinstance(given, Tensor) and own is not None:
                there, here = tuple(given.shape), tuple(own.shape)
                if there == (1, *here) or (1, *there) == here:
                    # An optimizer and copies of the parameter go by its shape, which therefore stays.
                    state_dict[key] = given.view(here)
                    self._saved_as[name] = there
                elif there == here:
                    self._saved_as.pop(name, None)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, shape in self._saved_as.items():
            if not keep_vars and f"{prefix}{name}" in destination:
                destination[f"{prefix}{name}"] = destination[f"{prefix}{name}"].view(shape)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)}" for name in self._sizes)
