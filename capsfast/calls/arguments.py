"""The arguments of the public functions: checked here once, then passed on as one value.

A :class:`Call` holds the inputs of an op: u and weight, or votes; the parameters of the capsules; the options.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import checks, positions
from .axes import AXES, axes_of
from .checks import shape_of
from .options import PassOptions, RoutingOptions

OTHER_ORDERS = "; docs/migration.md turns weights of other layers into this order"


class _Given:
    """Stands for the weight if the first argument is votes. Not None, which a user may pass as a weight by mistake."""

    def __repr__(self) -> str:
        return "GIVEN"


GIVEN: Any = _Given()


class RoutingParameters(NamedTuple):
    """The tensors beside u and weight of a routing, in the order of the op schema; None if not given."""

    logits: Tensor | None = None  # [I, J] or [B, I, J]
    bias: Tensor | None = None  # [J, D]
    mask: Tensor | None = None  # [B, I]
    out_mask: Tensor | None = None  # [B, J]


class PassParameters(NamedTuple):
    """The tensors beside u and weight of a pass, in the order of the op schema; None if not given."""

    query: Tensor | None = None  # [B, J, D]
    precision: Tensor | None = None  # [B, J, D]
    center: Tensor | None = None  # [B, J, D]
    prior: Tensor | None = None  # [B, J]
    logits: Tensor | None = None  # [I, J] or [B, I, J]
    activation: Tensor | None = None  # [B, I]
    lse: Tensor | None = None  # [B, I]
    mask: Tensor | None = None  # [B, I]
    out_mask: Tensor | None = None  # [B, J]


@dataclass
class Call:
    """A checked call.

    u: ``[B, I, P K]``; without a weight the votes ``[B, I, J or 1, D]`` or ``[B, I, J, D, S]``. weight ``[I or 1, J or
    1, R, K]``: P poses share it (P is 1 except for pose matrices), and D is P R, the P votes one after the other. J:
    number of output capsules. S: number of positions, each routed independently; then every tensor with an axis B
    ends in an axis S.
    """

    op: str  # the public function, which errors name
    u: Tensor
    weight: Tensor | None
    parameters: Any  # RoutingParameters or PassParameters
    options: Any  # RoutingOptions or PassOptions
    J: int
    D: int
    P: int = 1

    @property
    def shared_outputs(self) -> bool:
        """Whether one vote of an input capsule serves all output capsules."""
        shared: int = self.u.shape[2] if self.weight is None else self.weight.shape[1]
        return shared != self.J

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Call":
        """With every float tensor changed."""

        def changed(value: Tensor | None) -> Tensor | None:
            return value if value is None or not value.is_floating_point() else change(value)

        parameters = type(self.parameters)(*map(changed, self.parameters))
        return replace(self, u=change(self.u), weight=changed(self.weight), parameters=parameters)

    def as_samples(self) -> "Call":
        """Every position as a sample of its own."""
        if self.weight is not None or self.u.dim() == 4:
            return self
        per_sample = {
            name: value if value is None or axes_of(name, value)[0] != "B" else positions.to_samples(value)
            for name, value in self.parameters._asdict().items()
        }
        return replace(self, u=positions.to_samples(self.u), parameters=type(self.parameters)(**per_sample))


def unchecked(
    u: Tensor, weight: Tensor | None, parameters: Any, options: Any, J: int | None = None, op: str = "capsfast"
) -> Call:
    """A call from arguments that are known to fit. J: only needed if all output capsules share the votes."""
    if weight is None:
        return Call(op, u, weight, parameters, options, u.shape[2] if J is None else J, u.shape[3])
    _, columns, R, K = weight.shape
    P = 1 if K == 0 else u.shape[2] // K
    return Call(op, u, weight, parameters, options, columns if J is None else J, P * R, P)


def check(
    op: str,
    u: Any,
    weight: Any,
    parameters: RoutingParameters | PassParameters,
    options: PassOptions | RoutingOptions,
    J_needed: bool = False,
) -> tuple[Call, Callable[[Tensor], Tensor] | None]:
    """The checked call of a routing or a pass, and a function that restores the axes of positions, if there are any.

    weight: GIVEN if u are votes. options: already checked. J_needed: if all output capsules share weight or votes,
    another argument must say how many output capsules there are.

    Raises:
        ValueError, TypeError: an argument does not fit.
    """
    pairs = zip(parameters._fields, parameters, strict=True)
    given = {name: value for name, value in pairs if value is not None}
    spatial: tuple[int, ...] = ()
    if weight is GIVEN:
        weight = None
        u, spatial = votes(op, u)
        call = unchecked(u, weight, parameters, options, op=op)
    else:
        call = of_product(op, u, weight, parameters, options)
        u, weight = call.u, call.weight
    if call.J == 1:
        saying = [name for name in parameters._fields if "J" in AXES[name]]
        anchor, value, axis = ("votes", u, 2) if weight is None else ("weight", weight, 1)
        call.J = outputs(op, anchor, value, axis, {name: given.get(name) for name in saying}, J_needed)
    if given:
        sizes = (u.shape[0], u.shape[1], call.J, call.D)
        check_parameters(op, "votes" if weight is None else "u", u, sizes, given, spatial)
    if not spatial:
        return call, None
    spread = {name: positions.spread(name, value, spatial) for name, value in given.items()}
    call.parameters = parameters._replace(**spread)
    if positions.alone(spatial):
        call.u = u.squeeze(-1)
    shared = call.u.dim() == 5 and call.shared_outputs
    # If output capsules share one vote, an op without positions sums the vote's gradient before it rounds. So positions
    # become samples. DTensors keep their positions, because they cannot merge an axis that is split with another axis.
    as_samples = shared and not hasattr(u, "placements")
    if as_samples:
        call = call.as_samples()
    elif shared:
        call.u = call.u.expand(-1, -1, call.J, -1, -1)
    return call, positions.restoring(u.shape[0], spatial, as_samples)


def of_product(op: str, u: object, weight: object, parameters: Any = None, options: Any = None) -> Call:
    """A call of u and weight, which it checks."""
    if isinstance(u, Tensor) and isinstance(weight, Tensor) and u.dim() == 3 and weight.dim() == 4:
        # The quick check, which nearly every call passes.
        dtype, (_, I, K), (rows, J, D, size) = u.dtype, u.shape, weight.shape
        alike = dtype == weight.dtype and u.device == weight.device and u.layout == weight.layout == torch.strided
        if alike and size == K and (rows == I or rows == 1) and dtype in checks.FLOATING:
            return Call(op, u, weight, parameters, options, J, D)
    return unchecked(*product(op, u, weight), parameters, options, op=op)


def product(op: str, u: object, weight: object) -> tuple[Tensor, Tensor]:
    """u [B, I, K] and weight [I or 1, J, D, K], or pose matrices u [B, I, P, Q] and weight [I or 1, J, Q, R].

    Returns both in the layout of the ops: pose matrices become u [B, I, P Q] and weight [I or 1, J, R, Q].
    """
    if isinstance(u, Tensor) and u.dim() == 4:
        u, weight = checks.tensor(op, "u", u, "[B, I, P, Q]"), checks.tensor(op, "weight", weight, "[I, J, Q, R]")
        symbol, axis = "Q", 2
    else:
        u = checks.tensor(op, "u", u, "[B, I, K]")
        if isinstance(weight, Tensor) and weight.dim() != 4:
            raise ValueError(f"{op}: weight must have shape [I, J, D, K], got {shape_of(weight)}{OTHER_ORDERS}")
        weight = checks.tensor(op, "weight", weight, "[I, J, D, K]")
        symbol, axis = "K", 3
    checks.floating(op, "u", u)
    checks.floating(op, "weight", weight)
    I, size = u.shape[1], u.shape[-1]
    rows = weight.shape[0]
    if (rows != I and rows != 1) or weight.shape[axis] != size:
        _refuse_product(op, u, weight, symbol)
    if symbol == "Q" and (u.shape[2] == 0 or size == 0):
        raise ValueError(f"{op}: pose matrices [P, Q] must not be empty, got u {shape_of(u)}")
    checks.same_device(op, "u", u, "weight", weight)
    checks.same_dtype(op, "u", u, "weight", weight)
    return (u, weight) if symbol == "K" else (u.flatten(2), weight.transpose(2, 3))


def _refuse_product(op: str, u: Tensor, weight: Tensor, symbol: str) -> NoReturn:
    """Raises the error for u and weight that don't fit; ``symbol`` names the axis that the products sum over."""
    I, size, rows = u.shape[1], u.shape[-1], weight.shape[0]
    got = f"(weight {shape_of(weight)}, u {shape_of(u)})"
    if symbol == "K" and weight.shape[3] == I and rows in (1, size):
        raise ValueError(f"{op}: u must be [B, I, K] with K={I}, got K={size} {got}{checks.transposed('u')}")
    if rows != I and rows != 1:
        raise ValueError(f"{op}: weight must have 1 or I={I} rows, got {rows} {got}{OTHER_ORDERS}")
    if symbol == "K":
        raise ValueError(
            f"{op}: weight must end in K={size}, the size of the input capsules, got {weight.shape[3]} "
            f"{got}{OTHER_ORDERS}"
        )
    raise ValueError(
        f"{op}: weight must be [I, J, Q, R] with Q={size}, the size of the input capsules [P, Q], "
        f"got {weight.shape[2]} {got}"
    )


def votes(op: str, value: object) -> tuple[Tensor, tuple[int, ...]]:
    """votes [B, I, J, D] or [B, I, J, D, *spatial], with spatial flattened to one axis; and the sizes of spatial."""
    if not isinstance(value, Tensor) or value.dim() < 4:
        checks.tensor(op, "votes", value, "[B, I, J, D]")
    assert isinstance(value, Tensor)
    checks.dense(op, "votes", value)
    checks.floating(op, "votes", value)
    spatial = tuple(value.shape[4:])
    return (value.flatten(4) if len(spatial) > 1 else value), spatial


def outputs(op: str, anchor: str, value: Tensor, axis: int, saying: Mapping[str, object], needed: bool = True) -> int:
    """J: the size of ``axis`` of the anchor. If that is 1, J is read from the first tensor given in ``saying``.

    Raises an error if no tensor is given and J is ``needed``. The check of shapes later finds contradictions.
    """
    J: int = value.shape[axis]
    if J != 1:
        return J
    for name, size in saying.items():
        if isinstance(size, Tensor) and size.dim() > 1:
            return size.shape[axes_of(name, size).index("J")]
    if needed:
        raise ValueError(
            f"{op}: {anchor} {shape_of(value)} is shared by all output capsules, so another argument must say how many "
            f"there are, got none of {', '.join(saying)}; pass prior=torch.zeros(B, J)"
        )
    return J


def check_parameters(
    op: str,
    anchor: str,
    anchor_value: Tensor,
    sizes: tuple[int, int, int, int],
    given: Mapping[str, Tensor | None],
    spatial: tuple[int, ...] = (),
) -> None:
    """Checks shapes, dtypes and devices of the other arguments against the anchor tensor of ``sizes`` (B, I, J, D).

    Arguments with an axis B may end in the sizes of ``spatial``.
    """
    symbols = dict(zip("BIJD", sizes, strict=True))
    for name, value in given.items():
        if value is None:
            continue
        axes = axes_of(name, value)
        if _is_usual(value, tuple([symbols[axis] for axis in axes]), name.endswith("mask"), anchor_value):
            continue
        own = spatial if axes[0] == "B" and isinstance(value, Tensor) and value.dim() > len(axes) else ()
        if not own:
            checks.tensor(op, name, value, f"[{', '.join(axes)}]")
        elif value.dim() != len(axes) + len(own):
            spelled = ", ".join((*axes, *map(str, own)))
            raise ValueError(f"{op}: {name} must have shape [{spelled}], got {shape_of(value)}")
        else:
            checks.dense(op, name, value)
        if name.endswith("mask") and value.dtype != torch.bool:
            raise TypeError(
                f"{op}: {name} must be bool (True = use), got {checks.dtype_of(value)}; convert it with {name}.bool()"
            )
        wanted = [*(symbols[axis] for axis in axes), *own]
        if any(size != right for size, right in zip(value.shape, wanted, strict=True)):
            rule = " or ".join(
                f"[{', '.join(axes)}] = [{', '.join(str(symbols[axis]) for axis in axes)}]"
                for axes in (("IJ", "BIJ") if name == "logits" else (axes,))
            )
            if own:
                rule += f", and may end in the positions {list(spatial)}"
            raise ValueError(f"{op}: {name} must be {rule}, got {shape_of(value)} ({anchor} {shape_of(anchor_value)})")
        if not name.endswith("mask"):
            checks.parameter_dtype(op, name, value, anchor, anchor_value)
        checks.same_device(op, anchor, anchor_value, name, value)
    if given.get("precision") is not None:
        checks.not_negative(op, "precision", given["precision"], ", an inverse variance,")


def _is_usual(value: object, wanted: tuple[int, ...], mask: bool, anchor: Tensor) -> bool:
    """The quick check of an argument, which nearly all arguments pass."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.shape != wanted:
        return False
    return value.dtype == (torch.bool if mask else anchor.dtype) and value.device == anchor.device
