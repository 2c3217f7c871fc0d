"""Fully connected capsule layer."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..backend import ORDER
from ..functional import dynamic_routing
from ..options import Options


class DynamicRouting(nn.Module):
    """Fully connected capsules with dynamic routing (Sabour, Frosst, Hinton 2017): ``u -> v``.

    Parameters: ``W [in_caps, out_caps, out_dim, in_dim]`` (``[1, ...]`` if shared), ``logits
    [in_caps, out_caps]`` and ``bias [out_caps, out_dim]`` on request.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        num_iterations: weighted sums formed, at least 1.
        shared_weight: one matrix per output capsule, shared by all input capsules.
        learned_logits: a parameter for the log prior of the coupling, starting at 0.
        bias: a parameter added to the weighted sum, starting at 0.1 as in the authors' code.
        softmax, gradient, leaky, squash, eps, share_batch_logits, backend: see
            :func:`capsfast.dynamic_routing`.
        init_std: W starts as a normal distribution of this deviation, cut at two deviations. The
            default 0.1 is the authors'. Useful values are 0.01 to 0.1: ``torch.randn`` saturates
            the squash, and the margin loss then stands still.
        device, dtype: of the parameters.

    Shapes: ``u [B, in_caps, in_dim]`` to ``v [B, out_caps, out_dim]``.

    Raises:
        ValueError, TypeError: sizes below 1, or options that the function rejects.
    """

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
        super().__init__()
        op = "capsfast.DynamicRouting"
        sizes = {"in_caps": in_caps, "out_caps": out_caps, "in_dim": in_dim, "out_dim": out_dim}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{op}: {name} must be an int, got {size!r}")
            if size < 1:
                raise ValueError(f"{op}: {name} must be at least 1, got {size}")
        if not 0 < init_std < float("inf"):
            raise ValueError(f"{op}: init_std must be positive and finite, got {init_std}")
        if backend is not None and backend not in ORDER:
            raise ValueError(f"{op}: backend must be one of {', '.join(map(repr, ORDER))}, got {backend!r}")
        checks.boolean(op, "share_batch_logits", share_batch_logits)
        checks.options(op, Options(num_iterations, softmax, gradient, leaky, squash, eps))
        self.in_caps = in_caps
        self.out_caps = out_caps
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.num_iterations = num_iterations
        self.softmax = softmax
        self.gradient = gradient
        self.leaky = leaky
        self.squash = squash
        self.eps = eps
        self.share_batch_logits = share_batch_logits
        self.init_std = init_std
        self.backend = backend

        rows = 1 if shared_weight else in_caps
        self.W = nn.Parameter(torch.empty(rows, out_caps, out_dim, in_dim, device=device, dtype=dtype))
        self.register_parameter(
            "logits",
            nn.Parameter(torch.empty(in_caps, out_caps, device=device, dtype=dtype)) if learned_logits else None,
        )
        self.register_parameter(
            "bias", nn.Parameter(torch.empty(out_caps, out_dim, device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws W anew; logits to 0, bias to 0.1."""
        nn.init.trunc_normal_(self.W, std=self.init_std, a=-2 * self.init_std, b=2 * self.init_std)
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
        """``u [B, I, K]`` to ``v [B, J, D]``, with ``return_coupling`` also ``c [B, I, J]``.

        ``logits`` given here are added to the learned ones, if any.
        """
        if isinstance(u, Tensor) and u.dim() == 3 and (u.shape[1] != self.in_caps or u.shape[2] != self.in_dim):
            raise ValueError(
                f"capsfast.DynamicRouting: u must be [B, in_caps={self.in_caps}, in_dim={self.in_dim}], "
                f"got {checks.shape_of(u)}"
            )
        if self.logits is not None:
            if logits is not None and logits.shape[-2:] != self.logits.shape:
                raise ValueError(
                    f"capsfast.DynamicRouting: logits must end in {checks.shape_of(self.logits)}, got "
                    f"{checks.shape_of(logits)}"
                )
            logits = self.logits if logits is None else self.logits + logits
        return dynamic_routing(
            u,
            self.W,
            self.num_iterations,
            logits=logits,
            bias=self.bias,
            mask=mask,
            out_mask=out_mask,
            softmax=self.softmax,
            gradient=self.gradient,
            leaky=self.leaky,
            squash=self.squash,
            eps=self.eps,
            share_batch_logits=self.share_batch_logits,
            return_coupling=return_coupling,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        text = f"{self.in_caps}, {self.out_caps}, {self.in_dim}, {self.out_dim}, num_iterations={self.num_iterations}"
        defaults = {"softmax": "out", "gradient": "full", "leaky": False, "squash": "paper", "eps": 1e-8}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)!r}"
        if self.share_batch_logits:
            text += ", share_batch_logits=True"
        if self.backend is not None:
            text += f", backend={self.backend!r}"
        if self.W.shape[0] == 1 and self.in_caps != 1:
            text += ", shared_weight=True"
        if self.logits is not None:
            text += ", learned_logits=True"
        if self.bias is not None:
            text += ", bias=True"
        return text
