"""Dynamic routing as a routing class, and as a layer of given votes."""

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function
from typing_extensions import Unpack

from ...calls import arguments, checks
from ...calls.arguments import RoutingParameters
from ...calls.options import Backend, OptionKeywords, Options, checked_options
from ...functional import ROUTING, route_votes, routed
from ...kinds import FORMS
from .. import _arguments
from .._arguments import ParameterKeywords
from .._layer import Layer
from .base import Capsules, SummingRouting, lengths
from .votes import Votes

_options_of = attrgetter(*Options._fields)


class Agreement(Layer):
    """Holds the options of dynamic routing as attributes."""

    def _hold(self, num_iterations: int, options: OptionKeywords) -> None:
        vars(self).update(Options(num_iterations, **options)._asdict())

    def options(self) -> dict[str, Any]:
        """The options as keywords of :func:`capsfast.dynamic_routing`."""
        return {name: getattr(self, name) for name in Options._fields}


class AgreementRouting(Agreement, SummingRouting):
    """Dynamic routing (Sabour, Frosst, Hinton 2017, procedure 1).

    It runs the fused op :func:`capsfast.dynamic_routing` or :func:`capsfast.route_votes`; if windows compete, passes.
    The activation of an output capsule is its length. :class:`capsfast.DynamicRouting` is the layer with this routing;
    it returns only the poses.

    Parameters, on request: ``logits [in_caps, out_caps]`` and ``bias [out_caps, out_dim]``.

    Args:
        num_iterations, learned_logits, bias, options: as for :class:`capsfast.DynamicRouting`.
        all others: as for :class:`Routing`.
    """

    independent = True
    logits: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        num_iterations: int = 3,
        learned_logits: bool = False,
        bias: bool = False,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, num_iterations=num_iterations, backend=backend)
        self._hold(num_iterations, options)
        for name, shape in (("logits", (in_caps, out_caps)), ("bias", (out_caps, out_dim))):
            wanted = learned_logits if name == "logits" else bias
            parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if wanted else None
            self.register_parameter(name, parameter)
        self._initialise()

    def _initialise(self) -> None:
        if self.logits is not None:
            nn.init.zeros_(self.logits)
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1)

    def route(self, votes: Votes, activation: Tensor | None, logits: Tensor | None = None) -> Capsules:
        """``logits [I, J]`` or ``[B, I, J]`` are added to the learned logits."""
        v = votes.agree(**self.options(), logits=self.prior(logits), bias=self.bias)
        return Capsules(v, lengths(v))

    def route_product(self, op: str, u: Tensor, weight: Tensor) -> Capsules | None:
        """The result of a call with ``(u, weight)`` alone; None if it needs the call. ``op``: what errors name."""
        logits, bias = self.logits, self.bias
        call = arguments.of_product(op, u, weight)
        sizes = (u.shape[0], u.shape[1], call.J, call.D)
        if sizes[1:] != (self.in_caps, self.out_caps, self.out_dim) or has_torch_function((u, weight, logits, bias)):
            return None
        options = checked_options(ROUTING, *_options_of(self))
        if logits is not None or bias is not None:
            arguments.check_parameters(ROUTING, "u", u, sizes, {"logits": logits, "bias": bias})
        v, _ = routed(call, options, RoutingParameters(logits, bias), False, self.backend)
        return Capsules(v, torch.linalg.vector_norm(v, dim=-1))

    def prior(self, logits: Tensor | None) -> Tensor | None:
        """The sum of learned and given logits, None for 0.

        Raises:
            ValueError: shapes that differ.
        """
        learned = self.logits
        if learned is None or logits is None:
            return logits if learned is None else learned
        if isinstance(logits, Tensor) and logits.shape[-2:] != learned.shape:
            raise ValueError(
                f"{self._op}: logits must end in {checks.shape_of(learned)}, got {checks.shape_of(logits)}"
            )
        return learned + logits

    def extra_repr(self) -> str:
        text = super().extra_repr()
        for name, option in (("logits", "learned_logits"), ("bias", "bias")):
            text += f", {option}=True" if getattr(self, name) is not None else ""
        return text


class Given(ParameterKeywords, total=False):
    """The tensors that a call of :class:`RoutingByAgreement` may take."""

    bias: Tensor | None


class RoutingByAgreement(Agreement, Layer):
    """Routing by agreement over given votes (Sabour, Frosst, Hinton 2017, procedure 1): ``votes -> v``.

    It has no parameters and no sizes; :class:`AgreementRouting` has both.

    Args:
        num_iterations: number of weighted sums, at least 1.
        options: softmax, squash and so on, and backend: the keywords of :func:`capsfast.dynamic_routing`.

    Shapes: ``votes [B, I, J, D]`` to ``v [B, J, D]``.

    Raises:
        ValueError, TypeError: options that the function rejects.
    """

    _op = "capsfast.nn.RoutingByAgreement"
    _others = FORMS

    def __init__(
        self,
        num_iterations: int = 3,
        *,
        backend: Backend | None = None,
        **options: Unpack[OptionKeywords],
    ) -> None:
        super().__init__()
        self._hold(num_iterations, options)
        self.backend = backend

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __call__(
            self,
            votes: Tensor,
            batch_size: int | None = ...,
            *,
            return_coupling: Literal[False] = ...,
            **given: Unpack[Given],
        ) -> Tensor: ...
        @overload
        def __call__(
            self, votes: Tensor, batch_size: int | None = ..., *, return_coupling: Literal[True], **given: Unpack[Given]
        ) -> tuple[Tensor, Tensor]: ...
        @overload
        def __call__(
            self, votes: Tensor, batch_size: int | None = ..., *, return_coupling: bool, **given: Unpack[Given]
        ) -> Tensor | tuple[Tensor, Tensor]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self,
        votes: Tensor,
        batch_size: int | None = None,
        *,
        logits: Tensor | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        out_mask: Tensor | None = None,
        return_coupling: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``votes [B, I, J, D]`` to ``v [B, J, D]``, with ``return_coupling`` also ``c [B, I, J]``.

        ``batch_size`` exists because some code passes it; if given, it must be B.
        """
        _arguments.floats(self._op, "votes", votes, "[B, I, J, D]")
        _arguments.batch_size(self._op, batch_size, votes)
        return route_votes(
            votes,
            **self.options(),
            logits=logits,
            bias=bias,
            mask=mask,
            out_mask=out_mask,
            return_coupling=return_coupling,
            backend=self.backend,
        )

    def capsules(self, votes: Tensor, **given: Any) -> Capsules:
        """Calls the layer and returns its result with the lengths."""
        v: Tensor = self(votes, **given)
        return Capsules(v, lengths(v))
