"""Fully connected capsule layer."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..functional import dynamic_routing
from ..options import Options
from . import _arguments
from ._dynamic import RoutingLayer


class DynamicRouting(RoutingLayer):
    """Fully connected capsules with dynamic routing (Sabour, Frosst, Hinton 2017): ``u -> v``.

    Parameters: ``W [in_caps, out_caps, out_dim, in_dim]`` (``[1, ...]`` if shared), ``logits
    [in_caps, out_caps]`` and ``bias [out_caps, out_dim]`` on request. ``groups`` divides the
    ``out_caps`` of W and logits (of a shared W not). With ``rank`` they are ``A [in_caps, rank, in_dim]`` and
    ``W [1, out_caps, out_dim, rank]``, whose product ``W_j A_i`` is the transformation matrix.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        num_iterations: weighted sums formed, at least 1.
        shared_weight: one matrix per output capsule (with ``rank`` one A too), shared by all input capsules.
        learned_logits: a parameter for the log prior of the coupling, starting at 0.
        bias: a parameter added to the weighted sum, starting at 0.1 as in the authors' code.
        rank: transformation matrices of this rank; ``u`` is transformed by A, then routed with a shared weight.
        groups: input and output capsules are cut into as many runs of equal length, and each run
            of inputs is routed to its run of outputs alone.
        top_k: each input capsule keeps the outputs, so many of its group, to which its coupling after
            one pass is largest; all iterations then run between these. The choice itself has no gradient.
            Costs a routing of two passes and logits ``[B, I, J]`` more.
        softmax, gradient, leaky, squash, eps, share_batch_logits, backend: see
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
    A: nn.Parameter | None
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
        groups: int = 1,
        top_k: int | None = None,
        softmax: str = "out",
        gradient: str = "full",
        leaky: bool = False,
        squash: str = "paper",
        eps: float = 1e-8,
        share_batch_logits: bool = False,
        init_std: float = 0.1,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = Options(num_iterations, softmax, gradient, leaky, squash, eps)
        super().__init__(options, share_batch_logits, top_k, backend)
        op = self._op
        _arguments.integers(op, in_caps=in_caps, out_caps=out_caps, in_dim=in_dim, out_dim=out_dim, groups=groups)
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
        self.in_caps = in_caps
        self.out_caps = out_caps
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.rank = rank
        self.groups = groups
        self.init_std = init_std

        rows = 1 if shared_weight else in_caps
        group_caps = out_caps // groups
        shape = (rows, group_caps, out_dim, in_dim)
        if rank is not None or shared_weight:
            shape = (1, out_caps, out_dim, rank or in_dim)
        self.W = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.register_parameter(
            "A", None if rank is None else nn.Parameter(torch.empty(rows, rank, in_dim, device=device, dtype=dtype))
        )
        self.register_parameter(
            "logits",
            nn.Parameter(torch.empty(in_caps, group_caps, device=device, dtype=dtype)) if learned_logits else None,
        )
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_caps, out_dim, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws W and A anew; logits to 0, bias to 0.1."""
        nn.init.trunc_normal_(self.W, std=self.init_std, a=-2 * self.init_std, b=2 * self.init_std)
        if self.A is not None:
            nn.init.normal_(self.A, std=self.A.shape[1] ** -0.5)
        if self.logits is not None:
            nn.init.zeros_(self.logits)
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1)

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
        if isinstance(u, Tensor) and u.dim() == 3 and (u.shape[1] != self.in_caps or u.shape[2] != self.in_dim):
            raise ValueError(
                f"{op}: u must be [B, in_caps={self.in_caps}, in_dim={self.in_dim}], got {checks.shape_of(u)}"
            )
        if self.logits is not None:
            if logits is not None and logits.shape[-2:] != self.logits.shape:
                raise ValueError(
                    f"{op}: logits must end in {checks.shape_of(self.logits)}, got {checks.shape_of(logits)}"
                )
            logits = self.logits if logits is None else self.logits + logits
        if self.A is not None:
            _arguments.floats(op, "u", u, "[B, I, K]")
            checks.same_device(op, "u", u, "A", self.A)
            checks.same_dtype(op, "u", u, "A", self.A)
            # Broadcast as a view: einsum would sum over the axis of length 1 of a shared A.
            u = torch.einsum("irk,bik->bir", self.A.expand(self.in_caps, -1, -1), u)
        if self.groups > 1:
            return self._route_groups(u, logits, mask, out_mask, return_coupling)
        return self._route(
            dynamic_routing,
            u,
            self.W,
            logits=logits,
            bias=self.bias,
            mask=mask,
            out_mask=out_mask,
            return_coupling=return_coupling,
        )

    def _route_groups(
        self, u: Tensor, logits: Tensor | None, mask: Tensor | None, out_mask: Tensor | None, return_coupling: bool
    ) -> Any:
        op, group_caps = self._op, self.out_caps // self.groups
        _arguments.floats(op, "u", u, "[B, I, K]")
        B, I, D = u.shape[0], self.in_caps, self.out_dim
        checks.parameters(op, "u", u, (B, I, group_caps, D), {"logits": logits, "mask": mask})
        checks.parameters(op, "u", u, (B, I, self.out_caps, D), {"out_mask": out_mask})

        def runs(tensor: Tensor | None, dim: int) -> tuple[Tensor | None, ...]:
            return (None,) * self.groups if tensor is None else tensor.chunk(self.groups, dim)

        weights = self.W.chunk(self.groups, 0 if self.W.shape[1] == group_caps else 1)
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
                weights,
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
        if self.groups > 1:
            text += f", groups={self.groups}"
        if (self.W if self.A is None else self.A).shape[0] == 1 and self.in_caps != 1:
            text += ", shared_weight=True"
        if self.logits is not None:
            text += ", learned_logits=True"
        if self.bias is not None:
            text += ", bias=True"
        return text


class DigitCaps(DynamicRouting):
    """:class:`DynamicRouting` under the name of the digit capsules of Sabour, Frosst, Hinton (2017)."""

    _op = "capsfast.nn.DigitCaps"


class ClassCaps(DynamicRouting):
    """:class:`DynamicRouting` under the name of class capsules: one output capsule for each class."""

    _op = "capsfast.nn.ClassCaps"
