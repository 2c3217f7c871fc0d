"""The state of an optimizer from another code's checkpoint."""

from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..calls import checks


def optimizer_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of an optimizer with every moment in the shape of its parameter.

    ``optimizer.load_state_dict`` takes moments of any shape, and the next step fails, or reads them in another order.
    Leading axes of length 1 are added or removed, as the layers of ``capsfast.compat`` do with weights.

    A parameter whose moments differ in shape, as Adafactor's do, is left as it is; so is the state of LBFGS.

    Args:
        optimizer: the optimizer that will load the state.
        state_dict: what ``state_dict()`` of an optimizer of the same parameters, in the same order, gave.

    Raises:
        ValueError: moments of another layout or size.

    Example:
        >>> optimizer = torch.optim.Adam(layer.parameters())
        >>> handle = optimizer.register_load_state_dict_pre_hook(capsfast.compat.optimizer_state)
        >>> optimizer.load_state_dict(checkpoint["optimizer"])
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for n, (key, parameter) in enumerate(zip(keys, parameters, strict=False)):  # load_state_dict compares their numbers
        moments = {
            name: value for name, value in state.get(key, {}).items() if isinstance(value, Tensor) and value.dim() > 0
        }
        shapes = {value.shape for value in moments.values()}
        if len(shapes) != 1 or shapes == {parameter.shape}:
            continue
        (shape,) = shapes
        if isinstance(optimizer, LBFGS):
            continue  # one vector for all parameters
        if _without_leading_ones(shape) != _without_leading_ones(parameter.shape):
            raise ValueError(
                f"capsfast.compat.optimizer_state: the moments of parameter {n} must be "
                f"{checks.shape_of(parameter)}, got {list(shape)}; take the state of an optimizer of this model, "
                f"or start without"
            )
        state[key] = state[key] | {name: value.view(parameter.shape) for name, value in moments.items()}
    return {**state_dict, "state": state}


def _without_leading_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    first = next((n for n, size in enumerate(shape) if size != 1), len(shape))
    return tuple(shape[first:])
