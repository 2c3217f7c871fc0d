"""Fully connected capsules with any routing."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..calls import arguments, checks
from ..environment.private_torch import any_autocast, any_global_hook, tracing_state, transformed
from . import _arguments, weights
from ._layer import Layer, hooked
from .routing.agreement import AgreementRouting
from .routing.base import Capsules, lengths
from .routing.names import RoutingChoice, make_routing
from .routing.votes import GroupedVotes, Votes, votes_of
from .weights import Weight

# The methods of the routing that a call without votes bypasses.
BYPASSED = ("forward", "route", "prior", "options")
_bypassed_of = attrgetter(*BYPASSED)
_BYPASSED = _bypassed_of(AgreementRouting)


class RoutedCaps(Layer):
    """Fully connected capsules with any routing: ``u, activation -> poses, activations``.

    Parameters: the parameters of ``weight``, by default ``W [in_caps, out_caps, out_dim, in_dim]``, with ``pose_rows``
    ``[in_caps, out_caps, Q, R]``; and the parameters of the routing, in ``routing``.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        routing: a name in :data:`capsfast.nn.ROUTINGS`, a :class:`Routing` class, or a function with the same
            arguments that returns a routing.
        weight: how to hold the matrices: :class:`FullWeight`, :class:`SharedWeight`, :class:`LowRank` or
            :class:`Groups`.
        shared_weight: short for ``weight=SharedWeight()``.
        positions: short for ``weight=FullWeight(positions)``.
        pose_rows: capsules are matrices with this number of rows, P, stored row by row: ``in_dim = P Q`` and
            ``out_dim = P R``. A vote is a matrix product ``[P, Q] [Q, R]`` (Hinton, Sabour, Frosst 2018). None:
            capsules are vectors.
        init_std: W starts as a normal distribution with this deviation, truncated at two deviations; default:
            :meth:`Routing.weight_std`; for ``"dynamic"`` see :class:`capsfast.DynamicRouting`.
        identity: add the identity to the initial W, whose matrices must be square. Input capsules with similar poses
            then have similar votes, whose mean is about as long as the poses. With independent matrices for many input
            capsules, the mean vote is close to 0.
        device, dtype: device and dtype of the parameters.
        options: options of the routing, such as num_iterations and backend.

    Shapes: ``u [B, in_caps, in_dim]`` and ``activation [B, in_caps]`` or None to :class:`Capsules`: poses
    ``[B, out_caps, out_dim]`` and activations ``[B, out_caps]``.

    Raises:
        ValueError, TypeError: sizes, options or inputs that do not fit.

    Example:
        >>> layer = capsfast.nn.RoutedCaps(144, 10, 8, 16, routing="em", num_iterations=2)
        >>> poses, activations = layer(torch.randn(4, 144, 8), torch.rand(4, 144))
        >>> poses.shape, activations.shape
        (torch.Size([4, 10, 16]), torch.Size([4, 10]))
    """

    # None if another weight has parameters of its own. For type checkers W is there, as in nearly every layer.
    W: nn.Parameter
    A: nn.Parameter | None
    U: nn.Parameter | None
    V: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        routing: RoutingChoice = "dynamic",
        weight: Weight | None = None,
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
        # A layer of windows sets this to wrap the votes, so that windows compete with each other.
        self.competing: Callable[[Votes], Votes] | None = None
        op = self._op
        self.in_caps, self.out_caps, self.in_dim, self.out_dim = in_caps, out_caps, in_dim, out_dim
        self.pose_rows, self.identity = pose_rows, identity
        self.held = weights.chosen(op, weight, shared_weight, positions)
        matrix = (out_dim, in_dim)
        if pose_rows is not None:
            matrix = pose_sizes(op, in_dim, out_dim, pose_rows)[1:]
        shapes = self.held.shapes(op, in_caps, out_caps, matrix)
        self._names = tuple(shapes)
        if pose_rows is not None and [*shapes] != ["W"]:
            raise ValueError(f"{op}: pose_rows needs a weight with whole matrices, got {self.held!r}; leave one out")
        if identity and ([*shapes] != ["W"] or matrix[0] != matrix[1]):
            got = f"{self.held!r} of {list(matrix)}"
            raise ValueError(f"{op}: identity needs square matrices in W, got {got}; leave it out")
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.routing = make_routing(op, routing, in_caps, out_caps, in_dim, out_dim, **options, **factory_kwargs)
        if self.routing.needs_votes:
            raise ValueError(
                f"{op}: routing must take (u, weight), got {checks.shown(self.routing)}, which needs votes in memory; "
                f"call the routing with votes, or use it in a layer whose convolution makes the votes"
            )
        logits = getattr(self.routing, "logits", None)
        if self.held.groups > 1 and isinstance(logits, nn.Parameter):
            # There is no coupling between groups.
            self.routing.logits = nn.Parameter(logits.detach()[:, : out_caps // self.held.groups].clone())
        self.init_std = init_std
        products, columns = matrix if pose_rows else matrix[::-1]
        sizes = {"columns": columns, "groups": self.held.groups, "alike": self.held.alike(in_caps)}
        self._std = self.routing.weight_std(products, **sizes) if init_std is None else init_std
        for name in weights.PARAMETERS:
            shape = shapes.get(name)
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape, **factory_kwargs)))
        self._initialise()

    @property
    def uses_activation(self) -> bool:
        """Whether the routing uses activations of the input capsules."""
        return self.routing.uses_activation

    def _initialise(self) -> None:
        self.held.start(self._std, *self._parameters_held())
        if self.identity:
            with torch.no_grad():
                self.W.diagonal(dim1=2, dim2=3).add_(1.0)  # type: ignore[union-attr]

    def _parameters_held(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]

    def votes(self, u: Tensor, mask: Tensor | None = None, out_mask: Tensor | None = None) -> Votes:
        """The votes of ``u [B, I, K]`` for the routing; they are not stored."""
        u = self._poses(self.listed(u, None)[0])
        votes = self._votes_of(u, mask, out_mask)
        votes.u = u  # the input capsules, for routings that use them
        return votes if self.competing is None else self.competing(votes)

    def _poses(self, u: Tensor) -> Tensor:
        """Checks ``u [B, I, K]``, and gives pose matrices their axes."""
        # The quick check, which nearly every call passes.
        usual = isinstance(u, Tensor) and u.dim() == 3 and u.layout == torch.strided and u.dtype in checks.FLOATING
        if not usual or u.shape[1] != self.in_caps or u.shape[2] != self.in_dim:
            _arguments.floats(self._op, "u", u, "[B, I, K]")
            checks.refuse_capsules(self._op, "u", u, in_caps=self.in_caps, in_dim=self.in_dim)
        return u if self.pose_rows is None else u.unflatten(2, (self.pose_rows, -1))

    def _votes_of(self, u: Tensor, mask: Tensor | None, out_mask: Tensor | None) -> Votes:
        op, groups = self._op, self.held.groups
        common: dict[str, Any] = {"J": self.out_caps // groups, "backend": self.routing.backend}
        if groups == 1:
            return votes_of(op, self._product(u), mask=mask, out_mask=out_mask, **common)
        sizes = (u.shape[0], self.in_caps, self.out_caps, self.out_dim)
        arguments.check_parameters(op, "u", u, sizes, {"mask": mask, "out_mask": out_mask})
        runs = [[None] * groups if keep is None else keep.chunk(groups, 1) for keep in (mask, out_mask)]
        parts = [
            votes_of(op, part, mask=own, out_mask=own_out, **common)
            for part, own, own_out in zip(self.held.products(u, *self._parameters_held()), *runs, strict=True)
        ]
        return GroupedVotes(parts, mask, out_mask)

    def _product(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments of a pass, without groups."""
        return (u, self.W) if self.held.keeps_all else self.held.product(u, *self._parameters_held())

    def listed(self, u: Tensor, activation: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The arguments of forward as lists: input capsules ``[B, I, K]`` and activations ``[B, I]``."""
        return u, activation

    def activated(
        self, u: Tensor, activation: Tensor | None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`listed`. Missing activations become the lengths of ``u`` if the routing uses activations."""
        u, activation = self.listed(u, activation)
        if activation is None and self.uses_activation:
            # A masked capsule may hold anything, so its length must not have a gradient.
            activation = lengths(u if mask is None else u.masked_fill(~mask[..., None], 0.0))
        return u, activation

    def capsules(self, u: Tensor, activation: Tensor | None = None, **given: Any) -> Capsules:
        """Calls the layer with activations if the routing uses them, see :meth:`activated`."""
        u, activation = self.activated(u, activation, given.get("mask"))
        return self(u, activation, **given)

    def forward(
        self, u: Tensor, activation: Tensor | None = None, *, mask: Tensor | None = None, out_mask: Tensor | None = None
    ) -> Capsules:
        """``activation [B, I]``: None for 1. ``mask [B, I]``, ``out_mask [B, J]``: bool, False takes a capsule out."""
        u, activation = self.listed(u, activation)
        if activation is None is mask is out_mask and self._runs_at_once(u):
            routing: AgreementRouting = self.routing  # type: ignore[assignment]
            capsules = routing.route_product(self._op, *self._product(self._poses(u)))
            if capsules is not None:
                return capsules
        return self.routing(self.votes(u, mask, out_mask), activation)

    def _runs_at_once(self, u: Tensor) -> bool:
        """Whether a fused op may compute an eager call without making votes, because nobody looks at or replaces them.

        Traced programs hold the call of the part ``routing``, which users see in them.
        """
        if torch.compiler.is_compiling() or tracing_state() is not None or any_autocast() or transformed():
            return False
        routing = self.routing
        if type(routing) is not AgreementRouting or hooked(routing) or any_global_hook():
            return False
        if not vars(routing).keys().isdisjoint(BYPASSED) or routing._compiled_call_impl is not None:
            return False
        # A user may also replace a method of the class.
        if _bypassed_of(AgreementRouting) != _BYPASSED or type(self).votes is not _VOTES or "votes" in vars(self):
            return False
        return self.held.groups == 1 and self.competing is None and type(u) is Tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        for name in ("logits", "bias"):  # older checkpoints have these parameters of the routing beside W
            if prefix + name in state_dict and getattr(self.routing, name, None) is not None:
                state_dict[f"{prefix}routing.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def extra_repr(self) -> str:
        return super().extra_repr() + weights.text(self.held)


_VOTES = RoutedCaps.votes


def pose_sizes(op: str, in_dim: int, out_dim: int, pose_rows: int) -> tuple[int, int, int]:
    """(P, Q, R) for pose matrices ``[P, Q]`` and votes ``[P, R]``."""
    checks.integer(op, "pose_rows", pose_rows)
    for name, size in (("in_dim", in_dim), ("out_dim", out_dim)):
        if size % pose_rows:
            raise ValueError(f"{op}: pose_rows must divide {name}={size}, got {pose_rows}")
    return pose_rows, in_dim // pose_rows, out_dim // pose_rows
