"""Fully connected capsules with any routing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from . import _arguments
from ._layer import Layer
from .dynamic_routing import DynamicRouting, at_positions, types_of
from .routing.base import Capsules, lengths
from .routing.names import RoutingChoice, make_routing
from .routing.votes import Votes, votes_of


class RoutedCaps(Layer):
    """Fully connected capsules with a routing of choice: ``u, activation -> poses, activations``.

    Parameters: ``W [in_caps, out_caps, out_dim, in_dim]``, or ``[1, ...]`` if shared; with ``pose_rows``
    ``[in_caps, out_caps, Q, R]``. ``positions`` divides the in_caps of W. Those of the routing are in its part
    ``routing``.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        routing: a name of :data:`capsfast.nn.ROUTINGS`, a :class:`Routing` class, or a function of the same
            arguments that makes one.
        shared_weight: one matrix per output capsule, shared by all input capsules.
        positions: so many input capsules behind one another are of one type, and share their matrices. Each call
            repeats these, as in :class:`capsfast.DynamicRouting`.
        pose_rows: capsules are matrices of so many rows, P, row by row: ``in_dim = P Q`` and ``out_dim = P R``. A vote
            is a product of matrices ``[P, Q] [Q, R]`` (Hinton, Sabour, Frosst 2018). None: capsules are vectors.
        init_std: W starts as a normal distribution of this deviation, cut at two deviations; by default what the
            routing says, see :meth:`Routing.weight_std`.
        identity: W starts as the identity plus that. Input capsules of like poses then vote alike, and the mean of
            their votes is about as long as they are. Independent matrices of many input capsules give votes whose mean
            is close to 0. It needs matrices that are square.
        device, dtype: of the parameters.
        options: of the routing, such as num_iterations and backend.

    Shapes: ``u [B, in_caps, in_dim]`` and ``activation [B, in_caps]`` or None to :class:`Capsules`: poses
    ``[B, out_caps, out_dim]`` and activations ``[B, out_caps]``.

    Raises:
        ValueError, TypeError: sizes, options or inputs that do not fit.
    """

    _op = "capsfast.nn.RoutedCaps"

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        routing: RoutingChoice = "dynamic",
        shared_weight: bool = False,
        positions: int = 1,
        pose_rows: int | None = None,
        init_std: float | None = None,
        identity: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        # What a layer of windows puts around the votes, whose samples then compete with each other.
        self.competing: Callable[[Votes], Votes] | None = None
        op = self._op
        _arguments.integers(op, in_caps=in_caps, out_caps=out_caps, in_dim=in_dim, out_dim=out_dim)
        checks.boolean(op, "shared_weight", shared_weight)
        checks.boolean(op, "identity", identity)
        if init_std is not None:
            _arguments.positive(op, "init_std", init_std)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.routing = make_routing(op, routing, in_caps, out_caps, in_dim, out_dim, **options, **made)
        if self.routing.needs_votes:
            raise ValueError(
                f"{op}: routing must be one that takes (u, weight), got {checks.shown(self.routing)}, which needs "
                f"votes in memory; call it with votes, or route those of a convolution"
            )
        self.in_caps = in_caps
        self.out_caps = out_caps
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.pose_rows = pose_rows
        self.positions = positions
        self.shared_weight = shared_weight
        types = types_of(op, in_caps, positions, shared_weight)
        rows = 1 if shared_weight else types
        if pose_rows is None:
            shape, summed = (rows, out_caps, out_dim, in_dim), in_dim
        else:
            P, Q, R = pose_sizes(op, in_dim, out_dim, pose_rows)
            shape, summed = (rows, out_caps, Q, R), Q
        if identity and shape[2] != shape[3]:
            raise ValueError(f"{op}: identity needs square matrices, got W {list(shape)}; leave it out")
        self.identity = identity
        self.init_std = self.routing.weight_std(summed) if init_std is None else init_std
        self.W = nn.Parameter(torch.empty(shape, **made))
        self.reset_parameters()

    @property
    def uses_activation(self) -> bool:
        """Whether the routing asks for activations of the input capsules."""
        return self.routing.uses_activation

    def reset_parameters(self) -> None:
        """Draws W anew."""
        nn.init.trunc_normal_(self.W, std=self.init_std, a=-2 * self.init_std, b=2 * self.init_std)
        if self.identity:
            with torch.no_grad():
                self.W.diagonal(dim1=2, dim2=3).add_(1.0)

    def votes(self, u: Tensor, mask: Tensor | None = None, out_mask: Tensor | None = None) -> Votes:
        """The votes of ``u [B, I, K]`` as the routing takes them; none is in memory."""
        op = self._op
        _arguments.floats(op, "u", u, "[B, I, K]")
        if u.shape[1] != self.in_caps or u.shape[2] != self.in_dim:
            checks.refuse_capsules(op, "u", u, in_caps=self.in_caps, in_dim=self.in_dim)
        if self.pose_rows is not None:
            u = u.unflatten(2, (self.pose_rows, -1))
        weight = at_positions(self.W, self.positions)
        votes = votes_of(op, (u, weight), mask=mask, out_mask=out_mask, backend=self.routing.backend)
        return votes if self.competing is None else self.competing(votes)

    def listed(self, u: Tensor, activation: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Input capsules and their activations as lists ``[B, I, K]`` and ``[B, I]``, whatever forward takes."""
        return u, activation

    def activated(
        self, u: Tensor, activation: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Listed, and where the routing asks for activations and there are none, these are the lengths of ``u``."""
        u, activation = self.listed(u, activation)
        if activation is None and self.uses_activation:
            # A capsule that is masked may hold anything; its length is not to have a gradient.
            activation = lengths(u if mask is None else u.masked_fill(~mask[..., None], 0.0))
        return u, activation

    def forward(
        self, u: Tensor, activation: Tensor | None = None, *, mask: Tensor | None = None, out_mask: Tensor | None = None
    ) -> Capsules:
        """``activation [B, I]``: None for 1. ``mask [B, I]``, ``out_mask [B, J]``: bool, False takes a capsule out."""
        return self.routing(self.votes(u, mask, out_mask), activation)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        text = f"{self.in_caps}, {self.out_caps}, {self.in_dim}, {self.out_dim}"
        if self.pose_rows is not None:
            text += f", pose_rows={self.pose_rows}"
        if self.positions > 1:
            text += f", positions={self.positions}"
        if self.identity:
            text += ", identity=True"
        return f"{text}, shared_weight=True" if self.shared_weight and self.in_caps != 1 else text


def pose_sizes(op: str, in_dim: int, out_dim: int, pose_rows: int) -> tuple[int, int, int]:
    """(P, Q, R) of pose matrices ``[P, Q]`` that become votes ``[P, R]``."""
    _arguments.integer(op, "pose_rows", pose_rows)
    for name, size in (("in_dim", in_dim), ("out_dim", out_dim)):
        if size % pose_rows:
            raise ValueError(f"{op}: pose_rows must divide {name}={size}, got {pose_rows}")
    return pose_rows, in_dim // pose_rows, out_dim // pose_rows


FullyConnected = DynamicRouting | RoutedCaps


def fully_connected(
    in_caps: int,
    out_caps: int,
    in_dim: int,
    out_dim: int,
    routing: RoutingChoice = "dynamic",
    num_iterations: int | None = None,
    **options: Any,
) -> FullyConnected:
    """The layer of a routing: :class:`DynamicRouting` with all its options, else :class:`RoutedCaps`.

    ``num_iterations``: None for what the routing has by default; a routing that makes one pass takes no number.
    """
    if num_iterations is not None:
        options["num_iterations"] = num_iterations
    if routing == "dynamic":
        return DynamicRouting(in_caps, out_caps, in_dim, out_dim, **options)
    return RoutedCaps(in_caps, out_caps, in_dim, out_dim, routing=routing, **options)


def route(layer: nn.Module, u: Tensor, activation: Tensor | None = None, **given: Any) -> Capsules:
    """Poses and activations of a layer, whichever kind it is.

    ``activation``: of the input capsules; where the routing asks for them and there are none, their lengths.
    """
    if isinstance(layer, DynamicRouting):
        v = layer(u, **given)
        return Capsules(v, lengths(v))
    assert isinstance(layer, RoutedCaps)
    u, activation = layer.activated(u, activation, given.get("mask"))
    return layer(u, activation, **given)  # type: ignore[no-any-return]
