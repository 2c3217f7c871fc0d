"""Fully connected capsules with dynamic routing."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Literal, NoReturn, overload

from torch import Tensor
from typing_extensions import Unpack

from .. import kinds
from ..calls import checks
from ..calls.options import Options
from ..functional import dynamic_routing
from ._arguments import AgreementKeywords
from ._arguments import ParameterKeywords as Given
from ._layer import hooked
from .routed_caps import RoutedCaps
from .routing.agreement import AgreementRouting
from .routing.base import Capsules, lengths
from .routing.names import RoutingChoice
from .routing.votes import RecordedVotes
from .weights import Weight

Coupled = tuple[Tensor, Tensor]  # v and the coupling c


def _refuse_votes(op: str, u: object, *others: object) -> NoReturn:
    """Raises the error for a call with votes, or with several arguments, as layers of votes are called."""
    got = checks.shape_of(u) if isinstance(u, Tensor) else type(u).__name__
    if others:
        got += f" and {len(others)} more"
    raise TypeError(
        f"{op}: takes u [B, in_caps, in_dim] and all else by keyword, got {got}; for votes [B, I, J, D], as "
        f"layer(votes) or layer(votes, batch_size), use capsfast.nn.RoutingByAgreement or "
        f"capsfast.compat.DynamicRouting(num_iterations); see {kinds.TABLE}"
    )


class DynamicRouting(RoutedCaps):
    """Fully connected capsules with dynamic routing (Sabour, Frosst, Hinton 2017): ``u -> v``.

    The layer is :class:`capsfast.nn.RoutedCaps` with ``routing="dynamic"``, but it returns only the poses.

    Parameters: the parameters of ``weight``, by default ``W [in_caps, out_caps, out_dim, in_dim]``. On request, in
    ``routing``: ``logits [in_caps, out_caps]`` (with groups ``[in_caps, out_caps / groups]``) and ``bias
    [out_caps, out_dim]``.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        num_iterations: weighted sums formed, at least 1.
        weight, shared_weight, positions: see :class:`capsfast.nn.RoutedCaps`.
        learned_logits: a parameter for the log prior of the coupling, starting at 0.
        bias: a parameter added to the weighted sum, starting at 0.1 as in the authors' code.
        options: softmax, squash and so on, and backend: the keywords of :func:`capsfast.dynamic_routing`.
        init_std: the weight starts as a normal distribution with this deviation, truncated at two deviations. The
            authors' 0.1 suits their 1152 to 10 capsules of size 16. The default keeps the length of weighted sums
            at any sizes, and is 0.1 at these; sums start shorter where iterations would saturate the squash. A large
            deviation, as of ``torch.randn``, saturates the squash at once, so that the margin loss does not fall.
        device, dtype: device and dtype of the parameters.

    Shapes: ``u [B, in_caps, in_dim]`` to ``v [B, out_caps, out_dim]``.

    Raises:
        ValueError, TypeError: sizes below 1, or options that :func:`capsfast.dynamic_routing` rejects.

    Example:
        >>> layer = capsfast.DynamicRouting(in_caps=1152, out_caps=10, in_dim=8, out_dim=16)
        >>> layer(torch.randn(4, 1152, 8)).shape
        torch.Size([4, 10, 16])
    """

    _op = "capsfast.DynamicRouting"
    _others = kinds.FORMS
    routing: AgreementRouting
    logits: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        *,
        weight: Weight | None = None,
        shared_weight: bool = False,
        positions: int = 1,
        learned_logits: bool = False,
        bias: bool = False,
        init_std: float | None = None,
        **options: Unpack[AgreementKeywords],
    ) -> None:
        super().__init__(
            in_caps,
            out_caps,
            in_dim,
            out_dim,
            weight=weight,
            shared_weight=shared_weight,
            positions=positions,
            init_std=init_std,
            num_iterations=num_iterations,
            learned_logits=learned_logits,
            bias=bias,
            **options,
        )

    @overload  # type: ignore[override]
    def __call__(self, u: Tensor, *, return_coupling: Literal[False] = ..., **given: Unpack[Given]) -> Tensor: ...
    @overload
    def __call__(self, u: Tensor, *, return_coupling: Literal[True], **given: Unpack[Given]) -> Coupled: ...
    @overload
    def __call__(self, u: Tensor, *, return_coupling: bool, **given: Unpack[Given]) -> Tensor | Coupled: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            _refuse_votes(self._op, *args)
        return super().__call__(*args, **kwargs)

    def forward(  # type: ignore[override]
        self,
        u: Tensor,
        *,
        logits: Tensor | None = None,
        mask: Tensor | None = None,
        out_mask: Tensor | None = None,
        return_coupling: bool = False,
    ) -> Tensor | Coupled:
        """``u [B, I, K]`` to ``v [B, J, D]``, with ``return_coupling`` also ``c [B, I, J / groups]``.

        ``logits``, whose last axis is as long as the last axis of ``c``, are added to learned logits.
        """
        if isinstance(u, Tensor):
            if u.dim() == 3 and (u.shape[1] != self.in_caps or u.shape[2] != self.in_dim):
                checks.refuse_capsules(self._op, "u", u, in_caps=self.in_caps, in_dim=self.in_dim)
            if u.dim() == 4 and u.shape[1:] == (self.in_caps, self.out_caps, self.out_dim):
                _refuse_votes(self._op, u)
        routing, held = self.routing, self.held
        if hooked(routing) or held.groups > 1 or self.competing is not None:
            return self._by_votes(u, logits, mask, out_mask, return_coupling)
        u, weight = self._product(u)
        return dynamic_routing(
            u,
            weight,
            **routing.options(),
            logits=routing.logits if logits is None else routing.prior(logits),
            bias=routing.bias,
            mask=mask,
            out_mask=out_mask,
            return_coupling=return_coupling,
            backend=routing.backend,
        )

    def _by_votes(
        self, u: Tensor, logits: Tensor | None, mask: Tensor | None, out_mask: Tensor | None, return_coupling: bool
    ) -> Tensor | Coupled:
        """The result of :meth:`forward` by a call of the part ``routing``, so that its hooks run."""
        votes = self.votes(u, mask, out_mask)
        if not return_coupling:
            return self.routing(votes, logits=logits).poses
        recorded = RecordedVotes(votes, last=True)
        return self.routing(recorded, logits=logits).poses, recorded.weights[-1]

    def capsules(self, u: Tensor, activation: Tensor | None = None, **given: Any) -> Capsules:
        v = self(u, **given)
        return Capsules(v, lengths(v))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        W = self._parameters.get("W")
        if W is not None:
            weight = state_dict.get(f"{prefix}W")
            if isinstance(weight, Tensor) and weight.shape == (1, *W.shape):
                state_dict[f"{prefix}W"] = weight[0]
            lists[-1].extend(foreign_weights(self._op, state_dict, prefix, W))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)


def _of_routing(name: str) -> property:
    """An attribute of the part ``routing``, under its name in the layer."""
    return property(attrgetter(f"routing.{name}"), lambda layer, value: setattr(layer.routing, name, value))


for _name in (*Options._fields, "backend", "logits", "bias"):
    setattr(DynamicRouting, _name, _of_routing(_name))


class DigitCaps(DynamicRouting):
    """:class:`capsfast.DynamicRouting` under the name of the digit capsules of Sabour, Frosst, Hinton (2017)."""


class ClassCaps(DynamicRouting):
    """:class:`capsfast.DynamicRouting` under the name of class capsules: one output capsule for each class."""


def foreign_weights(op: str, state_dict: Mapping[str, Any], prefix: str, W: Tensor) -> list[str]:
    """Messages for weights that are not ``W [I, J, D, K]``, each with the conversion.

    prefix: prefix of the layer's entries. If W is there and fits, other entries are ignored. If W is missing, entries
    with the shape of a weight count as weights: torch does not tell whether loading is strict, and without W the layer
    would keep its initial weight.
    """
    entries = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    tensors = {name: value for name, value in entries.items() if "." not in name and isinstance(value, Tensor)}
    if "W" in tensors:
        tensors = {"W": tensors["W"]} if tensors["W"].shape != W.shape else {}
    sizes = dict(zip("IJDK", W.shape, strict=True))
    return [
        _message(op, name, value, sizes)
        for name, value in tensors.items()
        if name == "W" or kinds.orders_of(value.shape, sizes)
    ]


def _message(op: str, name: str, value: Tensor, sizes: Mapping[str, int]) -> str:
    orders = kinds.orders_of(value.shape, sizes)
    wanted = f"W [I, J, D, K] = {list(sizes.values())}"
    text = f"{op}: the weight must be {wanted}, got {name} {checks.shape_of(value)}"
    if len(orders) == 1:
        text += f", whose axes are {kinds.spelled(orders[0])}; load {{'W': {kinds.CONVERSIONS[orders[0]]}}}"
    elif orders:
        text += f", whose axes may be {' or '.join(map(kinds.spelled, orders))}"
    if fitting := kinds.with_weight(name, orders):
        text += f"{'' if len(orders) > 1 else ','} or use {kinds.listed(fitting)}"
    return f"{text}; see {kinds.TABLE}"


def fully_connected(
    in_caps: int, out_caps: int, in_dim: int, out_dim: int, routing: RoutingChoice, **options: Any
) -> RoutedCaps:
    """The layer for a routing: :class:`DynamicRouting` if it has all the options. None means the default."""
    sizes = (in_caps, out_caps, in_dim, out_dim)
    options = {name: value for name, value in options.items() if value is not None}
    if routing == "dynamic" and "pose_rows" not in options and "identity" not in options:
        return DynamicRouting(*sizes, **options)
    return RoutedCaps(*sizes, routing=routing, **options)
