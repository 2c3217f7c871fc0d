"""Fully connected capsule layer."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import arguments, checks
from ..functional import dynamic_routing
from ..options import Options
from . import _arguments, _called
from ._checkpoints import foreign_weights
from ._dynamic import RoutingLayer

FACTORS = ("WA", "UV")


def types_of(op: str, in_caps: int, positions: int, shared_weight: bool) -> int:
    """How many types the input capsules have.

    Raises:
        ValueError, TypeError: the positions do not divide them, or do not matter.
    """
    _arguments.integer(op, "positions", positions)
    if in_caps % positions:
        raise ValueError(f"{op}: positions must divide in_caps, got positions={positions} and in_caps={in_caps}")
    if positions > 1 and shared_weight:
        raise ValueError(f"{op}: shared_weight=True shares among all types too; leave out positions={positions}")
    return in_caps // positions


def at_positions(weight: Tensor, positions: int) -> Tensor:
    """``[types, ...]`` to a row for each position of each type; a single row serves all as it is."""
    if positions == 1 or weight.shape[0] == 1:
        return weight
    # Rows of stride 0 within types have no one stride over all: this copies.
    return weight.unsqueeze(1).expand(-1, positions, *weight.shape[1:]).flatten(0, 1)


class DynamicRouting(RoutingLayer):
    """Fully connected capsules with dynamic routing (Sabour, Frosst, Hinton 2017): ``u -> v``.

    Parameters: ``W [in_caps, out_caps, out_dim, in_dim]`` (``[1, ...]`` if shared), ``logits
    [in_caps, out_caps]`` and ``bias [out_caps, out_dim]`` on request. ``groups`` divides the
    ``out_caps`` of W and logits (of a shared W not). With ``rank`` they are ``A [in_caps, rank, in_dim]`` and
    ``W [1, out_caps, out_dim, rank]``, whose product ``W_j A_i`` is the transformation matrix, or with ``factors="UV"``
    ``U [in_caps, out_dim, rank]`` and ``V [out_caps, in_dim, rank]``, whose product is ``U_i V_j^T``. ``positions``
    divides the ``in_caps`` of W, A and U.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        num_iterations: weighted sums formed, at least 1.
        shared_weight: one matrix per output capsule (with ``rank`` one A too), shared by all input capsules.
        learned_logits: a parameter for the log prior of the coupling, starting at 0.
        bias: a parameter added to the weighted sum, starting at 0.1 as in the authors' code.
        rank: transformation matrices of this rank; see factors.
        factors: which of the two is that of the input capsule. ``"WA"``: the one that reads it, ``W_ij = W_j A_i``;
            ``u`` is transformed by A, then routed with a shared weight. ``"UV"``: the one that makes the vote,
            ``W_ij = U_i V_j^T``. No pass can be written with these factors alone, so each call forms the weight
            ``[in_caps, out_caps / groups, out_dim, in_dim]`` and, in backward, its gradient; the parameters stay small.
        positions: so many input capsules behind one another are of one type, and share their matrices: the order
            (type, row, column) of :class:`PrimaryCaps`. Each call repeats W to ``in_caps`` rows, as many numbers as the
            weight has without positions, and its gradient in backward; nothing is repeated for a single type (in each
            group), nor with ``rank`` and ``factors="WA"``.
        groups: input and output capsules are cut into as many runs of equal length, and each run
            of inputs is routed to its run of outputs alone.
        top_k: each input capsule keeps the outputs, so many of its group, to which its coupling after
            one pass is largest; all iterations then run between these. The choice itself has no gradient.
            Costs a routing of two passes and logits ``[B, I, J]`` more.
        softmax, gradient, leaky, squash, eps, squash_last, share_batch_logits, backend: see
            :func:`capsfast.dynamic_routing`.
        init_std: W starts as a normal distribution of this deviation, cut at two deviations. The
            default 0.1 is the authors'. Useful values are 0.01 to 0.1: ``torch.randn`` saturates
            the squash, and the margin loss then stands still. A starts with variance 1 / rank, so that
            the product has the deviation that W has without ``rank``.
        device, dtype: of the parameters.

    Shapes: ``u [B, in_caps, in_dim]`` to ``v [B, out_caps, out_dim]``.

    Raises:
        ValueError, TypeError: sizes below 1, or options that the function rejects.
    """

    _op = "capsfast.DynamicRouting"
    W: nn.Parameter | None
    A: nn.Parameter | None
    U: nn.Parameter | None
    V: nn.Parameter | None
    logits: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        *,
        shared_weight: bool = False,
        learned_logits: bool = False,
        bias: bool = False,
        rank: int | None = None,
        factors: str = "WA",
        positions: int = 1,
        groups: int = 1,
        top_k: int | None = None,
        softmax: str = "out",
        gradient: str = "full",
        leaky: bool = False,
        squash: str = "paper",
        eps: float = 1e-8,
        squash_last: bool = True,
        share_batch_logits: bool = False,
        init_std: float = 0.1,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = Options(num_iterations, softmax, gradient, leaky, squash, eps, squash_last)
        super().__init__(options, share_batch_logits, top_k, backend)
        op = self._op
        _arguments.integers(op, in_caps=in_caps, out_caps=out_caps, in_dim=in_dim, out_dim=out_dim, groups=groups)
        for name, value in (("shared_weight", shared_weight), ("learned_logits", learned_logits), ("bias", bias)):
            checks.boolean(op, name, value)
        _arguments.positive(op, "init_std", init_std)
        _arguments.divides(op, "in_caps", in_caps, groups)
        _arguments.divides(op, "out_caps", out_caps, groups)
        if top_k is not None and top_k > out_caps // groups:
            raise ValueError(
                f"{op}: top_k must be at most out_caps / groups = {out_caps // groups}, got {top_k}; "
                f"None keeps all outputs"
            )
        if rank is not None:
            _arguments.integer(op, "rank", rank)
        checks.choice(op, "factors", factors, FACTORS)
        if rank is None and factors != "WA":
            raise ValueError(f"{op}: factors={factors!r} needs a rank, got none")
        types = types_of(op, in_caps, positions, shared_weight)
        if types % groups and not shared_weight:
            raise ValueError(
                f"{op}: groups must divide in_caps / positions, so that no type is in two groups, got groups={groups} "
                f"and {types} types"
            )
        self.in_caps = in_caps
        self.out_caps = out_caps
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.rank = rank
        self.factors = factors
        self.positions = positions
        self.shared_weight = shared_weight
        self.groups = groups
        self.init_std = init_std

        group_caps = out_caps // groups
        rows = 1 if shared_weight else types
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        shapes: dict[str, tuple[int, ...]] = {"W": (rows, group_caps, out_dim, in_dim)}
        if rank is None and shared_weight:
            shapes = {"W": (1, out_caps, out_dim, in_dim)}
        elif rank is not None and factors == "WA":
            shapes = {"W": (1, out_caps, out_dim, rank), "A": (rows, rank, in_dim)}
        elif rank is not None:
            shapes = {"U": (rows, out_dim, rank), "V": (out_caps, in_dim, rank)}
        for name in ("W", "A", "U", "V"):
            given = nn.Parameter(torch.empty(shapes[name], **made)) if name in shapes else None
            self.register_parameter(name, given)
        self.register_parameter(
            "logits",
            nn.Parameter(torch.empty(in_caps, group_caps, device=device, dtype=dtype)) if learned_logits else None,
        )
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_caps, out_dim, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws W and A, or U and V, anew; logits to 0, bias to 0.1."""
        for each in (self.W, self.U):
            if each is not None:
                nn.init.trunc_normal_(each, std=self.init_std, a=-2 * self.init_std, b=2 * self.init_std)
        for each in (self.A, self.V):
            if each is not None:
                assert self.rank is not None
                nn.init.normal_(each, std=self.rank**-0.5)
        if self.logits is not None:
            nn.init.zeros_(self.logits)
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1:
            _called.refuse_votes(self._op, *args)
        return super().__call__(*args, **kwargs)

    def forward(
        self,
        u: Tensor,
        *,
        logits: Tensor | None = None,
        mask: Tensor | None = None,
        out_mask: Tensor | None = None,
        return_coupling: bool = False,
    ) -> Any:
        """``u [B, I, K]`` to ``v [B, J, D]``, with ``return_coupling`` also ``c [B, I, J / groups]``.

        ``logits``, whose last axis is as long as that of ``c``, are added to the learned ones, if any.
        """
        op = self._op
        votes = (self.in_caps, self.out_caps, self.out_dim)
        if isinstance(u, Tensor) and u.dim() == 4 and u.shape[1:] == votes:
            _called.refuse_votes(op, u)
        if isinstance(u, Tensor) and u.dim() == 3 and (u.shape[1] != self.in_caps or u.shape[2] != self.in_dim):
            checks.refuse_capsules(op, "u", u, in_caps=self.in_caps, in_dim=self.in_dim)
        if self.logits is not None:
            if isinstance(logits, Tensor) and logits.shape[-2:] != self.logits.shape:
                raise ValueError(
                    f"{op}: logits must end in {checks.shape_of(self.logits)}, got {checks.shape_of(logits)}"
                )
            logits = self.logits if logits is None else self.logits + logits
        if self.A is not None:
            _arguments.floats(op, "u", u, "[B, I, K]")
            checks.same_device(op, "u", u, "A", self.A)
            checks.same_dtype(op, "u", u, "A", self.A)
            # Broadcast as a view: einsum would sum over the axis of length 1 of a shared A.
            of_types = self.A.expand(self.in_caps // self.positions, -1, -1)
            u = torch.einsum("trk,btpk->btpr", of_types, u.unflatten(1, (-1, self.positions))).flatten(1, 2)
        if self.groups > 1:
            return self._route_groups(u, logits, mask, out_mask, return_coupling)
        return self._route(
            dynamic_routing,
            u,
            *self._weights(),
            logits=logits,
            bias=self.bias,
            mask=mask,
            out_mask=out_mask,
            return_coupling=return_coupling,
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        W = self._parameters.get("W")
        if W is not None:
            given = state_dict.get(f"{prefix}W")
            if isinstance(given, Tensor) and given.shape == (1, *W.shape):
                state_dict[f"{prefix}W"] = given[0]
            lists[-1].extend(foreign_weights(self._op, state_dict, prefix, W))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def _weights(self) -> list[Tensor]:
        """``[I / groups or 1, J / groups, D, K]`` of each group; K is the rank where A has transformed u."""
        G = self.groups
        if self.U is not None and self.V is not None:
            ours = [self.U] * G if self.shared_weight else self.U.chunk(G)
            parts = [torch.einsum("idr,jkr->ijdk", U, V) for U, V in zip(ours, self.V.chunk(G), strict=True)]
        else:
            assert self.W is not None
            parts = [*self.W.chunk(G, 1 if self.shared_weight or self.A is not None else 0)] if G > 1 else [self.W]
        return [at_positions(each, self.positions) for each in parts]

    def _route_groups(
        self, u: Tensor, logits: Tensor | None, mask: Tensor | None, out_mask: Tensor | None, return_coupling: bool
    ) -> Any:
        op, group_caps = self._op, self.out_caps // self.groups
        _arguments.floats(op, "u", u, "[B, I, K]")
        B, I, D = u.shape[0], self.in_caps, self.out_dim
        arguments.check_parameters(op, "u", u, (B, I, group_caps, D), {"logits": logits, "mask": mask})
        arguments.check_parameters(op, "u", u, (B, I, self.out_caps, D), {"out_mask": out_mask})

        def runs(tensor: Tensor | None, dim: int) -> tuple[Tensor | None, ...]:
            return (None,) * self.groups if tensor is None else tensor.chunk(self.groups, dim)

        parts = [
            self._route(
                dynamic_routing,
                poses,
                weight,
                logits=prior,
                bias=bias,
                mask=valid,
                out_mask=out_valid,
                return_coupling=return_coupling,
            )
            for poses, weight, prior, bias, valid, out_valid in zip(
                u.chunk(self.groups, 1),
                self._weights(),
                runs(logits, -2),
                runs(self.bias, 0),
                runs(mask, 1),
                runs(out_mask, 1),
                strict=True,
            )
        ]
        if return_coupling:
            v, c = zip(*parts, strict=True)
            return torch.cat(v, 1), torch.cat(c, 1)
        return torch.cat(parts, 1)

    def extra_repr(self) -> str:
        text = f"{self.in_caps}, {self.out_caps}, {self.in_dim}, {self.out_dim}, {super().extra_repr()}"
        if self.rank is not None:
            text += f", rank={self.rank}"
        if self.factors != "WA":
            text += f", factors={self.factors!r}"
        if self.positions > 1:
            text += f", positions={self.positions}"
        if self.groups > 1:
            text += f", groups={self.groups}"
        if self.shared_weight and self.in_caps != 1:
            text += ", shared_weight=True"
        if self.logits is not None:
            text += ", learned_logits=True"
        if self.bias is not None:
            text += ", bias=True"
        return text


class DigitCaps(DynamicRouting):
    """:class:`capsfast.DynamicRouting` under the name of the digit capsules of Sabour, Frosst, Hinton (2017)."""

    _op = "capsfast.nn.DigitCaps"


class ClassCaps(DynamicRouting):
    """:class:`capsfast.DynamicRouting` under the name of class capsules: one output capsule for each class."""

    _op = "capsfast.nn.ClassCaps"
