"""Routing layers as published, without capsfast, for which capsfast.compat has a class with the same name, signature,
parameters and results.

Logits come from a bare torch.zeros, as in published code. So they have torch's default dtype: set it to float64 for
tests in float64.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def squash(s: Tensor, eps: float = 0.0) -> Tensor:
    n = (s**2).sum(dim=-1, keepdim=True)
    return n / (1 + n) * s / torch.sqrt(n + eps)


def squash_of_norm(s: Tensor, eps: float = 1e-8) -> Tensor:
    norm = torch.norm(s, p=2, dim=-1, keepdim=True)
    return norm**2 / (1 + norm**2) / (norm + eps) * s


class VotesRouting(nn.Module):
    """``DynamicRouting(num_iterations)(u_hat, batch_size)``: votes ``[B, I, J, D]`` to ``[B, J, D]``."""

    def __init__(self, num_iterations: int = 3) -> None:
        super().__init__()
        self.num_iterations = num_iterations

    def forward(self, u_hat: Tensor, batch_size: int) -> Tensor:
        b_ij = torch.zeros(batch_size, u_hat.size(1), u_hat.size(2), 1)
        for iteration in range(self.num_iterations):
            c_ij = F.softmax(b_ij, dim=2)
            v_j = squash((c_ij * u_hat).sum(dim=1, keepdim=True), 1e-8)
            if iteration < self.num_iterations - 1:
                b_ij = b_ij + (u_hat * v_j).sum(dim=-1, keepdim=True)
        return v_j.squeeze(1)


class LayerRouting(nn.Module):
    """``DynamicRouting(in_capsules, out_capsules, in_dim, out_dim, num_iterations)`` with ``W [1, I, J, D, K]``."""

    def __init__(self, in_capsules: int, out_capsules: int, in_dim: int, out_dim: int, num_iterations: int = 3) -> None:
        super().__init__()
        self.in_capsules = in_capsules
        self.out_capsules = out_capsules
        self.num_iterations = num_iterations
        self.W = nn.Parameter(torch.randn(1, in_capsules, out_capsules, out_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        W = self.W.repeat(x.size(0), 1, 1, 1, 1)
        u_hat = torch.matmul(W, x.unsqueeze(2).unsqueeze(4)).squeeze(-1)
        b = torch.zeros(x.size(0), self.in_capsules, self.out_capsules)
        for i in range(self.num_iterations):
            c = F.softmax(b, dim=-1)
            v = squash((c.unsqueeze(-1) * u_hat).sum(dim=1), 1e-8)
            if i < self.num_iterations - 1:
                b = b + torch.einsum("bijd,bjd->bij", u_hat, v)
        return v


class InputCapsulesRouting(nn.Module):
    """``DynamicRouting(num_input_capsules, num_output_capsules, input_capsule_dim, output_capsule_dim,
    num_iterations)`` with ``weight [I, J, K, D]``.
    """

    def __init__(
        self,
        num_input_capsules: int,
        num_output_capsules: int,
        input_capsule_dim: int,
        output_capsule_dim: int,
        num_iterations: int = 3,
    ) -> None:
        super().__init__()
        self.num_iterations = num_iterations
        sizes = (num_input_capsules, num_output_capsules, input_capsule_dim, output_capsule_dim)
        self.weight = nn.Parameter(0.1 * torch.randn(*sizes))

    def forward(self, u: Tensor) -> Tensor:
        votes = (u[:, :, None, None, :] @ self.weight).squeeze(3)
        b = torch.zeros(votes.shape[:3])
        for _ in range(self.num_iterations):
            v = squash((F.softmax(b, dim=-1).unsqueeze(-1) * votes).sum(1), 1e-8)
            b = b + (votes @ v.permute(0, 2, 1).unsqueeze(1)).diagonal(dim1=2, dim2=3)
        return v


class CouplingRouting(nn.Module):
    """``DynamicRouting(n_in, n_out, in_dim, out_dim, n_iters)`` with ``W [I, J, D, K]``, which returns ``(v, c)``."""

    def __init__(self, n_in: int, n_out: int, in_dim: int, out_dim: int, n_iters: int = 3) -> None:
        super().__init__()
        self.n_iters = n_iters
        self.W = nn.Parameter(0.01 * torch.randn(n_in, n_out, out_dim, in_dim))

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        votes = (self.W @ u[:, :, None, :, None]).squeeze(-1)
        b = torch.zeros(votes.shape[:3])
        for _ in range(self.n_iters - 1):
            v = squash((b.softmax(2).unsqueeze(-1) * votes).sum(1), 1e-8)
            b = b + (votes * v.unsqueeze(1)).sum(-1)
        c = b.softmax(2)
        return squash((c.unsqueeze(-1) * votes).sum(1), 1e-8), c


def DynamicRouting(*args: Any, **kwargs: Any) -> nn.Module:
    """Four published classes have this name. Four positional sizes select LayerRouting."""
    if "num_input_capsules" in kwargs:
        return InputCapsulesRouting(**kwargs)
    if "n_in" in kwargs:
        return CouplingRouting(**kwargs)
    return LayerRouting(*args, **kwargs) if len(args) + len(kwargs) > 1 else VotesRouting(*args, **kwargs)


class DynamicRoutingLayer(nn.Module):
    """``DynamicRoutingLayer(in_capsules, out_capsules, in_dim, out_dim, num_iterations, share_weights)``: all
    iterations but the last on detached votes; ``W [I or 1, J, D, K]``.
    """

    def __init__(
        self,
        in_capsules: int,
        out_capsules: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 3,
        share_weights: bool = False,
    ) -> None:
        super().__init__()
        self.num_iterations = num_iterations
        self.W = nn.Parameter(0.1 * torch.randn(1 if share_weights else in_capsules, out_capsules, out_dim, in_dim))

    def forward(self, u: Tensor) -> Tensor:
        u_hat = torch.matmul(self.W, u[:, :, None, :, None]).squeeze(-1)
        constant = u_hat.detach()
        b = torch.zeros(u_hat.shape[:3])
        for _ in range(self.num_iterations - 1):
            v = squash((b.softmax(dim=2).unsqueeze(-1) * constant).sum(dim=1), 1e-8)
            b = b + (constant * v.unsqueeze(1)).sum(dim=-1)
        return squash((b.softmax(dim=2).unsqueeze(-1) * u_hat).sum(dim=1), 1e-8)


class LowerHigherCaps(nn.Module):
    """``DigitCaps(num_lower, num_higher, lower_dim, higher_dim, num_routing)`` with ``W [I, J, D, K]``."""

    def __init__(self, num_lower: int, num_higher: int, lower_dim: int, higher_dim: int, num_routing: int = 3) -> None:
        super().__init__()
        self.num_routing = num_routing
        self.W = nn.Parameter(0.01 * torch.randn(num_lower, num_higher, higher_dim, lower_dim))

    def forward(self, u: Tensor) -> Tensor:
        u_hat = (self.W @ u[:, :, None, :, None])[..., 0]
        b_ij = torch.zeros(*u_hat.shape[:3], 1)
        for r in range(self.num_routing):
            v = squash((torch.softmax(b_ij, 2) * u_hat).sum(1), 1e-8)
            if r != self.num_routing - 1:
                b_ij = b_ij + (u_hat * v[:, None]).sum(-1, keepdim=True)
        return v


class DetachedDigitCaps(nn.Module):
    """``DigitCaps(in_dim, in_caps, num_caps, dim_caps, num_routing)`` with ``W [1, J, I, D, K]``: all iterations but
    the last on detached votes, eps added to the norm.
    """

    def __init__(self, in_dim: int, in_caps: int, num_caps: int, dim_caps: int, num_routing: int) -> None:
        super().__init__()
        self.num_routing = num_routing
        self.W = nn.Parameter(0.01 * torch.randn(1, num_caps, in_caps, dim_caps, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        u_hat = (self.W @ x[:, None, :, :, None]).squeeze(-1)
        constant = u_hat.detach()
        b = torch.zeros(*u_hat.shape[:3], 1)
        for _ in range(self.num_routing - 1):
            v = squash_of_norm((b.softmax(1) * constant).sum(2))
            b = b + constant @ v.unsqueeze(-1)
        return squash_of_norm((b.softmax(1) * u_hat).sum(2))


class TwiceRoutedCaps(nn.Module):
    """``DigitCaps(in_capsules, in_dim, num_capsules, capsule_dim)`` with ``W [1, I, J, D, K]``: two iterations, eps
    added to the norm.
    """

    def __init__(self, in_capsules: int, in_dim: int, num_capsules: int, capsule_dim: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.01 * torch.randn(1, in_capsules, num_capsules, capsule_dim, in_dim))

    def forward(self, x: Tensor) -> Tensor:
        u_hat = torch.matmul(self.W, x.unsqueeze(2).unsqueeze(4)).squeeze(4)
        b = torch.zeros(u_hat.shape[:3])
        for _ in range(2):
            v = squash_of_norm((torch.softmax(b, dim=2).unsqueeze(-1) * u_hat).sum(dim=1))
            b = b + (u_hat * v.unsqueeze(1)).sum(-1)
        return v


def DigitCaps(**kwargs: Any) -> nn.Module:
    """Three published classes have this name."""
    if "num_lower" in kwargs:
        return LowerHigherCaps(**kwargs)
    return TwiceRoutedCaps(**kwargs) if "in_capsules" in kwargs else DetachedDigitCaps(**kwargs)


class DigitCapsules(nn.Module):
    """``DigitCapsules(num_caps_in, dim_caps_in, num_caps_out, dim_caps_out, routing_iters)``, ``W [1, I, J, D, K]``:
    eps added to the norm.
    """

    def __init__(
        self, num_caps_in: int, dim_caps_in: int, num_caps_out: int, dim_caps_out: int, routing_iters: int = 3
    ) -> None:
        super().__init__()
        self.routing_iters = routing_iters
        self.W = nn.Parameter(0.01 * torch.randn(1, num_caps_in, num_caps_out, dim_caps_out, dim_caps_in))

    def forward(self, x: Tensor) -> Tensor:
        u_hat = torch.matmul(self.W, x.unsqueeze(2).unsqueeze(4)).squeeze(4)
        b_ij = torch.zeros(1, u_hat.size(1), u_hat.size(2), 1)
        for _ in range(self.routing_iters):
            c_ij = F.softmax(b_ij, dim=2)
            v_j = squash_of_norm((c_ij * u_hat).sum(dim=1, keepdim=True))
            b_ij = b_ij + (u_hat * v_j).sum(dim=-1, keepdim=True)
        return v_j.squeeze(1)


class Router(nn.Module):
    """``Router(in_caps, out_caps, in_d, out_d, iterations)``: ``weight [I, J, K, D]``, softmax over the inputs."""

    def __init__(self, in_caps: int, out_caps: int, in_d: int, out_d: int, iterations: int) -> None:
        super().__init__()
        self.in_caps, self.out_caps, self.iterations = in_caps, out_caps, iterations
        self.weight = nn.Parameter(torch.randn(in_caps, out_caps, in_d, out_d))

    def forward(self, u: Tensor) -> Tensor:
        u_hat = torch.einsum("ijnm,bin->bijm", self.weight, u)
        b = u.new_zeros(u.shape[0], self.in_caps, self.out_caps)
        for _ in range(self.iterations):
            v = squash(torch.einsum("bij,bijm->bjm", b.softmax(dim=1), u_hat), 1e-8)
            b = b + torch.einsum("bjm,bijm->bij", v, u_hat)
        return v


class CapsuleLayer(nn.Module):
    """``CapsuleLayer(num_capsules, num_route_nodes, in_channels, out_channels, kernel_size, stride, num_iterations)``.

    ``route_weights [J, I, K, D]``, softmax over the inputs, result ``[J, B, 1, 1, D]``. With ``num_route_nodes=-1`` one
    convolution for each number of a primary capsule.
    """

    def __init__(
        self,
        num_capsules: int,
        num_route_nodes: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = None,
        stride: Any = None,
        num_iterations: int = 3,
    ) -> None:
        super().__init__()
        self.num_route_nodes = num_route_nodes
        self.num_iterations = num_iterations
        if num_route_nodes != -1:
            self.route_weights = nn.Parameter(torch.randn(num_capsules, num_route_nodes, in_channels, out_channels))
        else:
            self.capsules = nn.ModuleList(
                nn.Conv2d(in_channels, out_channels, kernel_size, stride) for _ in range(num_capsules)
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.num_route_nodes == -1:
            return squash(torch.cat([conv(x).view(x.size(0), -1, 1) for conv in self.capsules], dim=-1))
        priors = x[None, :, :, None, :] @ self.route_weights[:, None]
        logits = torch.zeros(*priors.size())
        for i in range(self.num_iterations):
            outputs = squash((F.softmax(logits, dim=2) * priors).sum(dim=2, keepdim=True))
            if i != self.num_iterations - 1:
                logits = logits + (priors * outputs).sum(dim=-1, keepdim=True)
        return outputs


class DenseCapsule(nn.Module):
    """``DenseCapsule(in_num_caps, in_dim_caps, out_num_caps, out_dim_caps, routings)``: ``weight [J, I, D, K]``, all
    iterations but the last on detached votes, eps added to the norm.
    """

    def __init__(
        self, in_num_caps: int, in_dim_caps: int, out_num_caps: int, out_dim_caps: int, routings: int = 3
    ) -> None:
        super().__init__()
        self.in_num_caps, self.out_num_caps, self.routings = in_num_caps, out_num_caps, routings
        self.weight = nn.Parameter(0.01 * torch.randn(out_num_caps, in_num_caps, out_dim_caps, in_dim_caps))

    def forward(self, x: Tensor) -> Tensor:
        x_hat = torch.matmul(self.weight, x[:, None, :, :, None]).squeeze(-1)
        b = torch.zeros(x.size(0), self.out_num_caps, self.in_num_caps)
        for i in range(self.routings):
            last = i == self.routings - 1
            c = F.softmax(b, dim=1)[..., None]
            outputs = squash_of_norm((c * (x_hat if last else x_hat.detach())).sum(dim=-2, keepdim=True))
            if not last:
                b = b + (outputs * x_hat.detach()).sum(dim=-1)
        return outputs.squeeze(-2)


class AgreementRouting(nn.Module):
    """``AgreementRouting(input_caps, output_caps, n_iterations)``: votes, learned logits ``b [I, J]``, one sum more
    than iterations.
    """

    def __init__(self, input_caps: int, output_caps: int, n_iterations: int) -> None:
        super().__init__()
        self.n_iterations = n_iterations
        self.b = nn.Parameter(torch.zeros(input_caps, output_caps))

    def forward(self, u_predict: Tensor) -> Tensor:
        b = self.b.expand(u_predict.shape[:3])
        v = squash((F.softmax(b, dim=2).unsqueeze(3) * u_predict).sum(dim=1))
        for _ in range(self.n_iterations):
            b = b + (u_predict * v.unsqueeze(1)).sum(-1)
            v = squash((F.softmax(b, dim=2).unsqueeze(3) * u_predict).sum(dim=1))
        return v


class CapsLayer(nn.Module):
    """``CapsLayer(input_caps, input_dim, output_caps, output_dim, routing_module)`` with ``weights [I, K, J*D]``."""

    def __init__(
        self, input_caps: int, input_dim: int, output_caps: int, output_dim: int, routing_module: nn.Module
    ) -> None:
        super().__init__()
        self.input_caps, self.output_caps, self.output_dim = input_caps, output_caps, output_dim
        self.weights = nn.Parameter(torch.empty(input_caps, input_dim, output_caps * output_dim))
        self.routing_module = routing_module
        nn.init.uniform_(self.weights, -1 / math.sqrt(input_caps), 1 / math.sqrt(input_caps))

    def forward(self, caps_output: Tensor) -> Tensor:
        votes = caps_output.unsqueeze(2).matmul(self.weights)
        votes = votes.view(votes.size(0), self.input_caps, self.output_caps, self.output_dim)
        return self.routing_module(votes)  # type: ignore[no-any-return]


class ProbabilityLinear(nn.Module):
    """``CapsuleLinear(out_capsules, in_length, out_length, in_capsules, share_weight, routing_type, num_iterations,
    squash, similarity)``, which returns capsules and probabilities.

    ``weight [J, D, K]`` shared by the inputs or ``[J, I, D, K]``; no squash after the last iteration unless demanded.
    """

    def __init__(
        self,
        out_capsules: int,
        in_length: int,
        out_length: int,
        in_capsules: int | None = None,
        share_weight: bool = True,
        routing_type: str = "k_means",
        num_iterations: int = 3,
        squash: bool = False,
        *,
        similarity: str = "dot",
    ) -> None:
        super().__init__()
        self.routing_type, self.num_iterations, self.squash = routing_type, num_iterations, squash
        own = () if share_weight else (in_capsules,)
        self.weight = nn.Parameter(torch.empty(out_capsules, *own, out_length, in_length))  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.weight)
        self.bias: nn.Parameter | None = None

    def forward(self, input: Tensor) -> Any:
        weight = self.weight if self.weight.dim() == 4 else self.weight[:, None]
        priors = (weight[None] @ input[:, None, :, :, None]).squeeze(dim=-1)
        shift = 0.0 if self.bias is None else self.bias[None, :, None]
        if self.routing_type == "dynamic":
            logits = torch.zeros_like(priors)
            for r in range(self.num_iterations):
                probs = F.softmax(logits, dim=-3)
                output = (probs * priors).sum(dim=-2, keepdim=True) + shift
                if r != self.num_iterations - 1:
                    logits = logits + (priors * squash(output)).sum(dim=-1, keepdim=True)
        else:
            output = priors.sum(dim=-2, keepdim=True) / priors.size(-3)
            for _ in range(self.num_iterations):
                direction = output / output.norm(dim=-1, keepdim=True).clamp(min=1e-12)
                probs = F.softmax((priors * direction).sum(dim=-1, keepdim=True), dim=-3)
                output = (probs * priors).sum(dim=-2, keepdim=True) + shift
        return (squash(output) if self.squash else output).squeeze(dim=-2), probs.mean(dim=-1)


class BiasLinear(ProbabilityLinear):
    """``CapsuleLinear(..., num_iterations, bias, squash, return_prob, similarity)``: another start of the weight."""

    def __init__(
        self,
        out_capsules: int,
        in_length: int,
        out_length: int,
        in_capsules: int | None = None,
        share_weight: bool = True,
        routing_type: str = "k_means",
        num_iterations: int = 3,
        bias: bool = True,
        squash: bool = True,
        *,
        return_prob: bool = False,
        similarity: str = "dot",
    ) -> None:
        nn.Module.__init__(self)
        self.routing_type, self.num_iterations, self.squash = routing_type, num_iterations, squash
        self.return_prob = return_prob
        weight = nn.init.xavier_uniform_(torch.rand(in_capsules or 1, in_length, out_capsules * out_length))
        weight = weight.permute(2, 0, 1).reshape(out_capsules, out_length, -1, in_length).transpose(1, 2)
        self.weight = nn.Parameter((weight[:, 0] if share_weight else weight).clone())
        self.bias = nn.Parameter(torch.zeros(out_capsules, out_length)) if bias else None

    def forward(self, input: Tensor) -> Any:
        found, probs = super().forward(input)
        return (found, probs) if self.return_prob else found


def CapsuleLinear(*args: Any, **kwargs: Any) -> nn.Module:
    """Two published classes have this name."""
    return (BiasLinear if {"bias", "return_prob"} & {*kwargs} else ProbabilityLinear)(*args, **kwargs)
