"""The ways in which a layer holds its transformation matrices."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..calls import checks
from . import _arguments

Shape = tuple[int, ...]
# All parameters that a weight may have, in the order in which a layer has them.
PARAMETERS = ("W", "A", "U", "V")


def types_of(op: str, in_caps: int, positions: int | None) -> int:
    """The number of types of the input capsules, which is the number of rows of a weight.

    Raises:
        ValueError: the positions do not divide the input capsules.
    """
    if positions is None:
        return 1
    if in_caps % positions:
        raise ValueError(f"{op}: positions must divide in_caps, got positions={positions} and in_caps={in_caps}")
    return in_caps // positions


def at_positions(weight: Tensor, positions: int | None) -> Tensor:
    """``[types, ...]`` to a row for each position of each type; a single row is returned as it is."""
    if positions is None or positions == 1 or weight.shape[0] == 1:
        return weight
    # This copies: rows that repeat within types have no common stride.
    return weight.unsqueeze(1).expand(-1, positions, *weight.shape[1:]).flatten(0, 1)


class Weight:
    """How a layer holds its matrices: its parameters, and the input capsules and weight of a pass.

    Your own weight defines ``axes`` and overrides shapes, start and product. It holds no tensor: the layer holds the
    parameters.
    """

    # Parameters by name, with the axis along which groups are concatenated; None if the groups share the parameter.
    axes: dict[str, int | None]
    # The number of groups: each group of input capsules votes only for its group of output capsules.
    groups: int = 1
    # Whether a pass takes the input capsules unchanged.
    keeps_u: ClassVar[bool] = True
    # Whether a pass takes input capsules and W unchanged, so that a layer need not call product().
    keeps_all: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            value = checks.plain(getattr(self, option.name))
            object.__setattr__(self, option.name, value)
            _arguments.option(f"capsfast.nn.{type(self).__name__}", option.name, option.type, value)

    def shapes(self, op: str, in_caps: int, out_caps: int, matrix: tuple[int, int]) -> dict[str, Shape]:
        """Shapes of the parameters for matrices of shape ``(D, K)``, or ``(Q, R)`` for pose matrices.

        Raises:
            ValueError: sizes that do not fit.
        """
        raise NotImplementedError(f"capsfast.nn.Weight: {type(self).__name__} must override shapes")

    def alike(self, in_caps: int) -> int:
        """The number of input capsules of a layer, or of a group, that share a matrix."""
        positions: int | None = getattr(self, "positions", 1)
        return in_caps if positions is None else positions

    def start(self, std: float, *parameters: Tensor) -> None:
        """Initialises the parameters so that the matrices have this deviation."""
        raise NotImplementedError(f"capsfast.nn.Weight: {type(self).__name__} must override start")

    def product(self, u: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments of :func:`capsfast.routing_pass`: input capsules and a weight ``[I or 1, J, D, K]``."""
        raise NotImplementedError(f"capsfast.nn.Weight: {type(self).__name__} must override product")

    def products(self, u: Tensor, *parameters: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The arguments of a pass for each group."""
        yield self.product(u, *parameters)


@dataclass(frozen=True)
class FullWeight(Weight):
    """A matrix for each pair of capsules, ``W [in_caps, out_caps, out_dim, in_dim]``.

    Args:
        positions: every run of ``positions`` input capsules is one type and shares its matrices: the order (type, row,
            column) of :class:`PrimaryCaps`. W then has ``in_caps / positions`` rows. Each call repeats W to ``in_caps``
            rows, and in backward its gradient; a single type is not repeated. None: all input capsules share, see
            :class:`SharedWeight`.
    """

    positions: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        keeps_all = self.positions in (1, None) and type(self).product is FullWeight.product
        object.__setattr__(self, "keeps_all", keeps_all)

    @property
    def axes(self) -> dict[str, int | None]:  # type: ignore[override]
        return {"W": 1 if self.positions is None else 0}

    def shapes(self, op: str, in_caps: int, out_caps: int, matrix: tuple[int, int]) -> dict[str, Shape]:
        return {"W": (types_of(op, in_caps, self.positions), out_caps, *matrix)}

    def start(self, std: float, *parameters: Tensor) -> None:
        for W in parameters:
            nn.init.trunc_normal_(W, std=std, a=-2 * std, b=2 * std)

    def product(self, u: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        (W,) = parameters
        return u, W if self.positions == 1 else at_positions(W, self.positions)


@dataclass(frozen=True)
class SharedWeight(FullWeight):
    """One matrix for each output capsule, shared by all input capsules: ``W [1, out_caps, out_dim, in_dim]``."""

    positions: None = field(default=None, init=False, repr=False)


@dataclass(frozen=True)
class LowRank(Weight):
    """Matrices of rank R, products of a factor of the input capsule and a factor of the output capsule.

    Args:
        rank: R.
        factors: ``"WA"``: ``W_ij = W_j A_i`` with ``A [in_caps, R, in_dim]`` and ``W [1, out_caps, out_dim, R]``. A
            transforms ``u``, which is then routed with a shared weight. ``"UV"``: ``W_ij = U_i V_j^T`` with
            ``U [in_caps, out_dim, R]`` and ``V [out_caps, in_dim, R]``. A pass can't use these factors, so each call
            forms the full weight and, in backward, its gradient; only the parameters are small.
        positions: as for :class:`FullWeight`, for A and U. With ``"WA"`` nothing is repeated.
    """

    rank: int
    factors: Literal["WA", "UV"] = "WA"
    positions: int | None = 1

    @property
    def axes(self) -> dict[str, int | None]:  # type: ignore[override]
        of_inputs = None if self.positions is None else 0
        return {"W": 1, "A": of_inputs} if self.factors == "WA" else {"U": of_inputs, "V": 0}

    @property
    def keeps_u(self) -> bool:  # type: ignore[override]
        return self.factors == "UV"

    def shapes(self, op: str, in_caps: int, out_caps: int, matrix: tuple[int, int]) -> dict[str, Shape]:
        rows, (D, K) = types_of(op, in_caps, self.positions), matrix
        if self.factors == "WA":
            return {"W": (1, out_caps, D, self.rank), "A": (rows, self.rank, K)}
        return {"U": (rows, D, self.rank), "V": (out_caps, K, self.rank)}

    def start(self, std: float, *parameters: Tensor) -> None:
        first, second = parameters
        nn.init.trunc_normal_(first, std=std, a=-2 * std, b=2 * std)
        nn.init.normal_(second, std=self.rank**-0.5)  # so that the product has the deviation of the first factor

    def product(self, u: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        if self.factors == "UV":
            weight = torch.einsum("idr,jkr->ijdk", *parameters)
            return u, at_positions(weight, self.positions)
        W, A = parameters
        op = "capsfast.nn.LowRank"
        _arguments.floats(op, "u", u, "[B, I, K]")
        checks.same_device(op, "u", u, "A", A)
        checks.same_dtype(op, "u", u, "A", A)
        if A.shape[0] == 1:
            return torch.einsum("rk,bik->bir", A[0], u), W
        of_types = u.unflatten(1, (A.shape[0], -1))
        return torch.einsum("trk,btpk->btpr", A, of_types).flatten(1, 2), W


@dataclass(frozen=True)
class Groups(Weight):
    """Splits input and output capsules into groups: each group of inputs votes only for its group of outputs.

    The parameters of ``weight`` for all groups are concatenated: ``W [in_caps, out_caps / groups, ...]``, or for a
    shared weight ``W [1, out_caps, ...]``.

    Args:
        groups: number of groups; it must divide the numbers of capsules and of types.
        weight: the weight of each group.
    """

    groups: int
    weight: Weight = FullWeight()
    keeps_u: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.weight, (FullWeight, LowRank)):
            raise TypeError(
                f"capsfast.nn.Groups: weight must be a FullWeight, SharedWeight or LowRank, got {self.weight!r}"
            )

    @property
    def axes(self) -> dict[str, int | None]:  # type: ignore[override]
        return self.weight.axes

    def shapes(self, op: str, in_caps: int, out_caps: int, matrix: tuple[int, int]) -> dict[str, Shape]:
        _arguments.divides(op, "in_caps", in_caps, self.groups)
        _arguments.divides(op, "out_caps", out_caps, self.groups)
        of_group = self.weight.shapes(op, in_caps // self.groups, out_caps // self.groups, matrix)
        return {
            name: tuple(size * self.groups if axis == self.axes[name] else size for axis, size in enumerate(shape))
            for name, shape in of_group.items()
        }

    def alike(self, in_caps: int) -> int:
        return self.weight.alike(in_caps // self.groups)

    def start(self, std: float, *parameters: Tensor) -> None:
        self.weight.start(std, *parameters)

    def products(self, u: Tensor, *parameters: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        axes = self.axes.values()
        parts = [
            [parameter] * self.groups if axis is None else parameter.chunk(self.groups, axis)
            for parameter, axis in zip(parameters, axes, strict=True)
        ]
        for run, *of_group in zip(u.chunk(self.groups, 1), *parts, strict=True):
            yield self.weight.product(run, *of_group)


def chosen(op: str, weight: Weight | None, shared_weight: bool, positions: int) -> Weight:
    """The weight that a layer's arguments describe.

    Raises:
        TypeError, ValueError: not a weight, or several of the arguments.
    """
    if weight is not None and not isinstance(weight, Weight):
        names = ", ".join(("FullWeight", "SharedWeight", "LowRank", "Groups"))
        raise TypeError(f"{op}: weight must be one of capsfast.nn's {names}, got {checks.shown(weight)}")
    if positions > 1 and shared_weight:
        raise ValueError(f"{op}: shared_weight=True shares among all types too; leave out positions={positions}")
    if weight is not None and (shared_weight or positions > 1):
        raise ValueError(f"{op}: weight={weight!r} says which capsules share; leave out shared_weight and positions")
    if weight is None:
        return SharedWeight() if shared_weight else FullWeight(positions)
    return weight.weight if isinstance(weight, Groups) and weight.groups == 1 else weight


def text(weight: Weight) -> str:
    """Text for extra_repr, with a comma in front; empty for the default FullWeight()."""
    return "" if weight == FullWeight() else f", weight={weight!r}"
