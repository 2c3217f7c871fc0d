"""The published routings, each in a few lines of torch that form votes and coupling coefficients.

ROUTINGS has a row for each name of :data:`capsfast.nn.ROUTINGS`. A plain routing takes the votes ``[B, I, J, D]``, the
activation ``[B, I]``, the module (for its options and parameters) and the input capsules ``u [B, I, K]``. It returns
poses ``[B, J, D]`` and activations ``[B, J]``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import plain

Plain = Callable[[Tensor, Tensor, Any, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    """definition: the plain routing. options: sets of options of the module under test; each set is a case.

    of_votes: whether votes alone are enough, so that a routing of given votes exists.
    """

    definition: Plain
    options: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    of_votes: bool = True


def dynamic(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sabour, Frosst, Hinton 2017, procedure 1."""
    v, _ = plain.route(votes, module.num_iterations, logits=module.logits, kind=module.squash)
    return v, v.square().sum(-1).sqrt()


def em(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Hinton, Sabour, Frosst 2018, procedure 1: responsibilities and Gaussian densities."""
    B, I, J, D = votes.shape
    mean, c = torch.zeros_like(votes[:, 0]), torch.full_like(votes[..., 0], 1 / (J + module.leaky))
    beta_u = module.beta_u if module.beta_u.dim() == 2 else module.beta_u[:, None].expand(J, D)
    for inverse_temperature in module.inverse_temperatures:
        r = c * a[:, :, None]
        mass = r.sum(1)  # [B, J]
        mean = (1 - module.momentum) * (r[..., None] * votes).sum(1) / mass[..., None] + module.momentum * mean
        variance = (r[..., None] * (votes - mean[:, None]) ** 2).sum(1) / mass[..., None] + module.floor
        if module.isotropic:
            variance = variance.mean(2, keepdim=True).expand(B, J, D)
        scale = {"sum": 1, "inputs": J / I, "mean": 1 / mass.mean(1, keepdim=True)}.get(module.cost_scale)
        scaled = (module.cost_scale if scale is None else scale) * mass
        terms = beta_u + (variance.sqrt().log() if module.cost == "variance" else 0)
        logit = inverse_temperature * (module.beta_a - (terms * scaled[..., None]).sum(2))
        e = logit.exp()
        out = e / (1 + e) if module.nonlinearity == "sigmoid" else e / e.sum(1, keepdim=True)
        distance = ((votes - mean[:, None]) ** 2 / (2 * variance[:, None])).sum(3)
        joint = out.log()[:, None] - distance - (2 * math.pi * variance).sqrt().log().sum(2)[:, None]
        if module.leaky:
            joint = torch.cat([joint, torch.zeros_like(joint[..., :1])], 2)
        c = plain.couple(joint)[..., :J]
    return mean, out


EM_OPTIONS: list[dict[str, Any]] = [
    {},
    {"final": 0.02, "cost_scale": "sum", "floor": 5e-4, "momentum": 0.1, "leaky": True},
    {"inverse_temperature": 0.5, "component_beta": True, "cost_scale": "inputs", "num_iterations": 2},
    {"floor": 0.01, "inverse_temperature": [0.1, 0.2, 0.4, 0.8], "nonlinearity": "softmax", "num_iterations": 4},
    {"isotropic": True, "cost_scale": 0.3, "num_iterations": 1},
    {"cost": "mass", "isotropic": True, "inverse_temperature": 0.2},
]


def weighted(c: Tensor, votes: Tensor) -> Tensor:
    """``c [B, I, J]`` and ``votes [B, I, J, D]`` to ``[B, J, D]``."""
    return (c[..., None] * votes).sum(1)


def length(v: Tensor) -> Tensor:
    return v.square().sum(-1).sqrt()


def self_routing(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Hahn, Pyeon, Kim 2019."""
    logits = (module.W_route * u[:, :, None]).sum(-1)
    if module.logits is not None:
        logits = logits + module.logits
    c = plain.couple(logits) * a[..., None]
    mass = c.sum(1)
    return weighted(c, votes) / mass[..., None], mass / a.sum(1, keepdim=True)


def attention(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """After Choi, Seo, Im, Kang 2019: one query for each output capsule, softmax over the input capsules."""
    D = votes.shape[3]
    c = plain.couple((votes * module.query).sum(-1) / math.sqrt(D), "in")
    v = (module.A * weighted(c, votes)[:, :, None]).sum(-1) + module.bias
    return v, length(v) / math.sqrt(D)


def self_attention(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Mazzia, Salvetti, Chiaberge 2021, equations 5 to 7, with all scores of pairs of input capsules."""
    scores = torch.einsum("bijd,bkjd->bjik", votes, votes) / math.sqrt(votes.shape[3])
    c = plain.couple(scores.sum(3).transpose(1, 2))
    v = plain.squash(weighted(c + module.bias, votes), module.squash)
    return v, length(v)


def inverted_attention(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Tsai, Srivastava, Goh, Salakhutdinov 2020, procedure 1, starting from poses of 0."""
    pose = torch.zeros_like(votes[:, 0])
    for _ in range(module.num_iterations):
        agreement = (votes * pose[:, None]).sum(-1) / (math.sqrt(votes.shape[3]) if module.scaled else 1)
        pose = module.gain * plain.normalized(weighted(plain.couple(agreement), votes)) + module.shift
    if module.readout is None:
        return pose, torch.ones_like(pose[..., 0])
    return pose, 1 / (1 + (-(pose * module.readout).sum(-1) - module.offset).exp())


def k_means(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Ren, Lu 2018: scores are dot products with the center at length 1."""
    center = weighted(plain.couple(torch.zeros_like(votes[..., 0]), module.softmax), votes)
    for _ in range(module.num_iterations):
        unit = center / (center.square().sum(-1, keepdim=True) + 1e-8).sqrt()
        c = plain.couple(module.sharpness * (votes * unit[:, None]).sum(-1), module.softmax)
        center = weighted(c, votes)
    v = plain.squash(center)
    return v, length(v)


def cosine(votes: Tensor, a: Tensor, module: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Nguyen, Hua, Le 2021: agreement with the sum at length 1; with exact, votes at length 1 too."""
    b = torch.zeros_like(votes[..., 0])
    for _ in range(module.num_iterations):
        s = weighted(plain.couple(b), votes) + (0 if module.bias is None else module.bias)
        cosines = (votes * (s / (s.square().sum(-1, keepdim=True) + 1e-8).sqrt())[:, None]).sum(-1)
        b = b + (cosines / length(votes) if module.exact else cosines)
    v = plain.squash(s)
    return v, length(v)


def normalized(value: Tensor, norm: nn.Module | None) -> Tensor:
    """``[B, J]`` or ``[B, J, D]`` as in training, over the batch and the numbers of a pose."""
    if norm is None:
        return value
    return plain.normalized(value, (0, *range(2, value.dim())))


def variational(
    votes: Tensor, a: Tensor, module: Any, u: Tensor, couple: Callable[[Tensor], Tensor] = plain.couple
) -> tuple[Tensor, Tensor]:
    """Ribeiro, Leontidis, Kollias 2020, with diagonal precisions; Bishop 2006, section 10.2. couple: of scores."""
    D = votes.shape[3]
    c = torch.full_like(votes[..., 0], 1 / votes.shape[2])
    for _ in range(module.num_iterations):
        r = c * a[..., None]
        N = r.sum(1)[..., None]
        center = weighted(r, votes) / N
        S = weighted(r, (votes - center[:, None]) ** 2)
        alpha, kappa, nu = module.alpha + N[..., 0], module.kappa + N, module.nu + N
        mean = N * center / kappa
        W = 1 / (module.psi + S + module.kappa * N / kappa * center**2)
        log_precision = sum(torch.digamma((nu[..., 0] - d) / 2) + math.log(2) + W[..., d].log() for d in range(D))
        log_share = torch.digamma(alpha) - torch.digamma(alpha.sum(1, keepdim=True))
        distance = D / kappa[..., 0][:, None] + (nu * W * (votes - mean[:, None]).transpose(0, 1) ** 2).sum(
            -1
        ).transpose(0, 1)
        c = couple((log_share + 0.5 * log_precision)[:, None] - 0.5 * distance - 0.5 * D * math.log(2 * math.pi))
    entropy = 0.5 * D * (1 + math.log(2 * math.pi)) - 0.5 * log_precision
    logit = module.beta_a - (module.beta_u + log_share.exp() * entropy)
    return normalized(mean, module.pose_norm), torch.sigmoid(normalized(logit, module.norm))


def convolutional_variational(layer: Any, poses: Tensor, activation: Tensor) -> tuple[Tensor, Tensor]:
    """The layer of Ribeiro, Leontidis, Kollias 2020: a capsule's coupling sums to 1 over all windows that it is in.

    ``poses [B, C, K, H, W]`` and ``activation [B, C, H, W]`` to poses ``[B, windows, J, D]`` and activations.
    """
    (B, _, K, *size), kernel, stride = poses.shape, layer.kernel_size, layer.stride

    def unfolded(image: Tensor) -> Tensor:  # [B, C, H, W] to [B windows, I]
        return nn.functional.unfold(image, kernel, stride=stride).transpose(1, 2).flatten(0, 1)

    def couple(scores: Tensor) -> Tensor:
        density = scores.exp()  # [B windows, I, J]
        of_windows = density.sum(2).unflatten(0, (B, -1)).transpose(1, 2)
        of_capsules = nn.functional.fold(of_windows, size, kernel, stride=stride)
        return density / unfolded(of_capsules)[..., None]

    u = torch.stack([unfolded(poses[:, :, k]) for k in range(K)], 2)
    votes = torch.einsum("bipq,ijqr->bijpr", u.unflatten(2, (layer.routing.pose_rows, -1)), layer.routing.W).flatten(3)
    found = variational(votes, unfolded(activation), layer.routing.routing, u, couple)
    return found[0].unflatten(0, (B, -1)), found[1].unflatten(0, (B, -1))


VARIATIONAL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_iterations": 2, "alpha": 0.5, "kappa": 2.0, "psi": 0.3, "nu": 5.5, "batch_norm": False},
]


ROUTINGS: dict[str, Row] = {
    "dynamic": Row(dynamic, [{}, {"num_iterations": 2, "learned_logits": True, "squash": "exp"}]),
    "attention": Row(attention),
    "cosine": Row(cosine, [{}, {"num_iterations": 2, "bias": False}]),
    "em": Row(em, EM_OPTIONS),
    "inverted-attention": Row(inverted_attention, [{}, {"num_iterations": 3, "scaled": True}]),
    "k-means": Row(k_means, [{}, {"num_iterations": 2, "sharpness": 4.0, "softmax": "in"}]),
    "self": Row(self_routing, [{}, {"shared_route": True, "learned_logits": True}], of_votes=False),
    "self-attention": Row(self_attention, [{}, {"squash": "paper"}]),
    "variational": Row(variational, VARIATIONAL_OPTIONS),
}
# Options with which a sample has the same result alone and in a batch.
ALONE: dict[str, dict[str, Any]] = {"variational": {"batch_norm": False}}


def cases() -> list[tuple[str, dict[str, Any]]]:
    """(name, options) for every set of options of every row."""
    return [(name, options) for name, row in ROUTINGS.items() for options in row.options]


def randomize(module: nn.Module) -> None:
    """Draws parameters that are not 0, 1 or equal, so that no test passes by luck."""
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.add_(0.3 * torch.randn_like(parameter))
