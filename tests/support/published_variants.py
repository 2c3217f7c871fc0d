"""More routing layers as published, without capsfast: other variants, and variants that no option reproduces. Logits as
in published_layers.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .published_layers import squash, squash_of_norm


class BatchMeanTransposed(nn.Module):
    """``(in_unit, in_channel, num_unit, unit_size, num_routing)``: input ``[B, K, I]``, ``W [1, I, J, D, K]``, logits
    averaged over the batch, result ``[B, J, D, 1]``.
    """

    def __init__(self, in_unit: int, in_channel: int, num_unit: int, unit_size: int, num_routing: int) -> None:
        super().__init__()
        self.num_unit, self.num_routing = num_unit, num_routing
        self.weight = nn.Parameter(torch.randn(1, in_channel, num_unit, unit_size, in_unit))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x.transpose(1, 2)] * self.num_unit, dim=2).unsqueeze(4)
        u_hat = torch.matmul(torch.cat([self.weight] * x.size(0), dim=0), x)
        b_ij = torch.zeros(1, self.weight.size(1), self.num_unit, 1)
        for _ in range(self.num_routing):
            c_ij = torch.cat([F.softmax(b_ij, dim=2)] * x.size(0), dim=0).unsqueeze(4)
            s_j = (c_ij * u_hat).sum(dim=1, keepdim=True)
            n = (s_j**2).sum(dim=3, keepdim=True)
            v_j = n / (1 + n) * (s_j / n.sqrt())
            agreement = torch.matmul(u_hat.transpose(3, 4), torch.cat([v_j] * u_hat.size(1), dim=1))
            b_ij = b_ij + agreement.squeeze(4).mean(dim=0, keepdim=True)
        return v_j.squeeze(1)


class BatchMeanOverInputs(nn.Module):
    """``(num_capsules, num_routes, in_channels, out_channels)``: ``W [1, I, J, D, K]``, softmax over the inputs,
    logits averaged over the batch. With ``elementwise`` the squash sums over an axis of length 1, so each number alone,
    and has no eps.
    """

    def __init__(
        self, num_capsules: int, num_routes: int, in_channels: int, out_channels: int, elementwise: bool = False
    ) -> None:
        super().__init__()
        self.num_capsules, self.num_routes = num_capsules, num_routes
        self.axis, self.eps = (4, 0.0) if elementwise else (3, 1e-8)
        self.W = nn.Parameter(torch.randn(1, num_routes, num_capsules, out_channels, in_channels))

    def forward(self, x: Tensor) -> Tensor:
        u_hat = torch.matmul(self.W, torch.stack([x] * self.num_capsules, dim=2).unsqueeze(4))
        b_ij = torch.zeros(1, self.num_routes, self.num_capsules, 1)
        for iteration in range(3):
            c_ij = F.softmax(b_ij, dim=1).unsqueeze(4)
            s_j = (c_ij * u_hat).sum(dim=1, keepdim=True)
            n = (s_j**2).sum(self.axis, keepdim=True)
            v_j = n * s_j / ((1.0 + n) * torch.sqrt(n + self.eps))
            if iteration < 2:
                agreement = torch.matmul(u_hat.transpose(3, 4), torch.cat([v_j] * self.num_routes, dim=1))
                b_ij = b_ij + agreement.squeeze(4).mean(dim=0, keepdim=True)
        return v_j.squeeze(1)


class CosineAgreement(nn.Module):
    """``(in_caps, out_caps, in_dim, out_dim)``: the agreement is the cosine of vote and output."""

    def __init__(self, in_caps: int, out_caps: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(in_caps, out_caps, out_dim, in_dim))

    def forward(self, u: Tensor) -> Tensor:
        votes = torch.einsum("ijdk,bik->bijd", self.W, u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(3):
            v = squash((b.softmax(2)[..., None] * votes).sum(1))
            b = b + F.cosine_similarity(votes, v[:, None], dim=-1)
        return v


class MergedRows(nn.Module):
    """``(in_caps, in_dim, out_caps, out_dim)``: ``weight [I, J*D, K]``, result ``[B, J*D]``."""

    def __init__(self, in_caps: int, in_dim: int, out_caps: int, out_dim: int) -> None:
        super().__init__()
        self.out_caps, self.out_dim = out_caps, out_dim
        self.weight = nn.Parameter(0.2 * torch.randn(in_caps, out_caps * out_dim, in_dim))

    def forward(self, u: Tensor) -> Tensor:
        votes = torch.matmul(self.weight, u.unsqueeze(-1)).view(u.size(0), u.size(1), self.out_caps, self.out_dim)
        b = torch.zeros(u.size(0), u.size(1), self.out_caps, 1)
        for _ in range(2):
            v = squash_of_norm((F.softmax(b, dim=2) * votes).sum(1), 1e-7)
            b = b + (votes * v[:, None]).sum(-1, keepdim=True)
        return v.flatten(1)


class Capsules(nn.Module):
    """``(num_caps_in, dim_caps_in, num_caps_out, dim_caps_out, num_iterations)``: ``W [1, I, J, D, K]``.

    axis: of the softmax, 1 for the inputs and 2 for the outputs. squash: one of SQUASHES. leaky: one more column of
    logit 0. learned: ``b [1, I, J, 1]`` and ``bias [1, J, D]`` are parameters.
    """

    SQUASHES: dict[str, Any] = {  # noqa: RUF012
        "1e-7": lambda s: squash(s, 1e-7),
        "1e-8": lambda s: squash(s, 1e-8),
        "1e-9": lambda s: squash(s, 1e-9),
        "none": squash,
        "outside": squash_of_norm,
        "half": lambda s: (s**2).sum(-1, keepdim=True) / (0.5 + (s**2).sum(-1, keepdim=True)) * F.normalize(s, dim=-1),
        "exp": lambda s: (1 - torch.exp(-s.norm(dim=-1, keepdim=True))) * s / s.norm(dim=-1, keepdim=True),
    }

    def __init__(
        self,
        num_caps_in: int,
        dim_caps_in: int,
        num_caps_out: int,
        dim_caps_out: int,
        num_iterations: int = 3,
        axis: int = 2,
        squash: str = "1e-8",
        leaky: bool = False,
        learned: bool = False,
    ) -> None:
        super().__init__()
        self.num_iterations, self.axis, self.leaky = num_iterations, axis, leaky
        self.squash = self.SQUASHES[squash]
        self.W = nn.Parameter(0.3 * torch.randn(1, num_caps_in, num_caps_out, dim_caps_out, dim_caps_in))
        self.b = nn.Parameter(torch.zeros(1, num_caps_in, num_caps_out, 1)) if learned else None
        self.bias = nn.Parameter(torch.full((1, num_caps_out, dim_caps_out), 0.1)) if learned else None

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.matmul(self.W, x[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(1, *votes.shape[1:3], 1) if self.b is None else self.b
        for _ in range(self.num_iterations):
            if self.leaky:
                c = F.softmax(torch.cat([torch.zeros_like(b[:, :, :1]), b], dim=2), dim=2)[:, :, 1:]
            else:
                c = F.softmax(b, dim=self.axis)
            s = (c * votes).sum(dim=1)
            v = self.squash(s if self.bias is None else s + self.bias)
            b = b + (votes * v.unsqueeze(1)).sum(dim=-1, keepdim=True)
        return v


class LatentCaps(nn.Module):
    """``(latent_caps_size, prim_caps_size, latent_vec_size, prim_vec_size)`` of 3D Point Capsules (Zhao et al. 2019):
    all iterations but the last on detached votes, no eps.
    """

    def __init__(self, latent_caps_size: int, prim_caps_size: int, latent_vec_size: int, prim_vec_size: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.1 * torch.randn(latent_caps_size, prim_caps_size, latent_vec_size, prim_vec_size))

    def forward(self, x: Tensor) -> Tensor:
        u_hat = torch.einsum("jidk,bik->bjid", self.W, x)
        constant = u_hat.detach()
        b = torch.zeros(u_hat.shape[:3])
        for _ in range(2):
            v = squash((b.softmax(1).unsqueeze(3) * constant).sum(2))
            b = b + torch.einsum("bjid,bjd->bji", constant, v)
        return squash((b.softmax(1).unsqueeze(3) * u_hat).sum(2))


class Interests(nn.Module):
    """``(in_units, out_units, max_len, k_max)``: one matrix ``[K, D]`` for all pairs, logits ``[1, J, I]`` drawn once
    and not learned.
    """

    B_matrix: Tensor

    def __init__(self, in_units: int, out_units: int, max_len: int, k_max: int, iteration: int = 3) -> None:
        super().__init__()
        self.iteration = iteration
        self.S_matrix = nn.Parameter(0.5 * torch.randn(in_units, out_units))
        self.register_buffer("B_matrix", torch.randn(1, k_max, max_len))

    def forward(self, low_capsule: Tensor) -> Tensor:
        mapped = torch.matmul(low_capsule, self.S_matrix)
        logits = self.B_matrix.repeat(low_capsule.size(0), 1, 1)
        for _ in range(self.iteration):
            high = squash(torch.matmul(F.softmax(logits, dim=1), mapped), 1e-9)
            logits = logits + torch.matmul(high, mapped.transpose(1, 2))
        return high


class Masked(nn.Module):
    """``(in_caps, out_caps, in_dim, out_dim, before)``, called with a mask ``[B, I]``, 1 for the inputs that count.

    The mask multiplies the coupling after a softmax over the outputs; with ``before`` it fills the logits of a softmax
    over the inputs.
    """

    def __init__(self, in_caps: int, out_caps: int, in_dim: int, out_dim: int, before: bool = False) -> None:
        super().__init__()
        self.before = before
        self.W = nn.Parameter(0.5 * torch.randn(in_caps, out_caps, in_dim, out_dim))

    def forward(self, u: Tensor, mask: Tensor) -> Tensor:
        votes = torch.einsum("ijkd,bik->bijd", self.W, u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(3):
            if self.before:
                c = b.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).softmax(dim=1)
            else:
                c = b.softmax(dim=2) * mask.unsqueeze(-1)
            v = squash(torch.einsum("bij,bijd->bjd", c, votes), 1e-8)
            b = b + torch.einsum("bijd,bjd->bij", votes, v)
        return v


class Lazy(nn.Module):
    """``(out_caps_num, out_caps_dim, routing)``: makes ``W [J, I, D, K]`` when it sees its first input."""

    W: Tensor | None

    def __init__(self, out_caps_num: int, out_caps_dim: int, routing: int = 3) -> None:
        super().__init__()
        self.out_caps_num, self.out_caps_dim, self.routing = out_caps_num, out_caps_dim, routing
        self.W = None

    def forward(self, x: Tensor) -> Tensor:
        if self.W is None:
            self.W = nn.Parameter(torch.empty(self.out_caps_num, x.size(1), self.out_caps_dim, x.size(2)))
            nn.init.xavier_uniform_(self.W)
        u_hat = torch.matmul(self.W, x[:, None, :, :, None]).squeeze(-1)
        b = torch.zeros(u_hat.shape[:3])
        for _ in range(self.routing):
            v = squash((torch.softmax(b, 1)[..., None] * u_hat).sum(2), 1e-7)
            b = b + (u_hat * v[:, :, None]).sum(-1)
        return v
