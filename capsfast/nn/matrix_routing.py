"""Routing of pose matrices to Gaussians that explain the votes, with benefit less cost as scores."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from ..calls import arguments, checks
from ..calls.options import Backend
from ..environment.private_torch import result
from ..reference.em_update import not_negative
from . import _arguments
from ._arguments import FactoryKwargs
from ._layer import Layer
from .routed_caps import pose_sizes
from .routing.votes import votes_of


@result
class ScoredCapsules(NamedTuple):
    """poses ``[B, J, D]``; scores ``[B, J]``, whose sigmoids are activations; variances ``[B, J, D]`` of the votes."""

    poses: Tensor
    scores: Tensor
    variances: Tensor


class MatrixRouting(Layer):
    """Routes scored pose matrices to output matrices that explain their votes (Heinsen 2019).

    With votes ``V_ij = u_i W_ij + b_ij`` and ``f_i = sigmoid(score_i)``, each iteration is::

        R_ij    = softmax_j(logsigmoid(s_j) + log N(V_ij; m_j, variance_j))   in the first iteration 1 / J
        use_ij  = f_i R_ij
        s_j     = sum_i (beta_use_ij use_ij - beta_ign_ij (f_i - use_ij))     scores: benefit less cost
        m_j     = sum_i use_ij V_ij / (sum_i use_ij + eps)                    poses
        variance_j = sum_i use_ij (V_ij - m_j)^2 / (sum_i use_ij + eps) + eps

    The softmax ``[B, I, J]`` is in memory, the votes are not. A pass without a gradient, ahead of the loop, finds where
    the votes lie, so that float32 does not cancel in the variances.

    Parameters, with the names and shapes of the author's ``GenerativeMatrixRouting`` and of his ``Routing`` with given
    ``n_out``, whose state dicts load here: ``W [I, J, Q, R]``, ``B [I, J, P, R]`` (b), ``beta_use`` and ``beta_ign
    [I, J]``. For any number of inputs, I is replaced by 1. The buffer ``CONST_one`` is 1.

    Source: "An Algorithm for Routing Capsules in All Domains", arXiv:1911.00792.

    Args:
        in_caps: I; None for any number, which calls may change.
        out_caps: J, at least 2.
        in_dim, out_dim: ``K = P Q`` and ``D = P R``. An input capsule is a matrix ``[P, Q]`` row by row.
        pose_rows: P.
        num_iterations: at least 1.
        model: ``"gaussian"``, or ``"k-means"`` with ``-|V_ij - m_j|^2`` instead of the log density.
        single_beta: ``beta_ign`` and ``beta_use`` are one parameter.
        eps: above 0.
        backend: see :func:`capsfast.dynamic_routing`.
        device, dtype: of the parameters.

    Shapes: u ``[B, I, K]``, scores ``[B, I]`` and mask ``[B, I]``, bool, to :class:`ScoredCapsules`. False in the mask
    takes an input capsule out, whatever it and its score hold; so does a score of -inf if the capsule is finite.

    Raises:
        ValueError, TypeError: a size or an option that does not fit; in a call, a shape, a dtype or a device.
    """

    CONST_one: Tensor

    def __init__(
        self,
        in_caps: int | None,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        pose_rows: int,
        num_iterations: int = 3,
        *,
        model: Literal["gaussian", "k-means"] = "gaussian",
        single_beta: bool = False,
        eps: float = 1e-5,
        backend: Backend | None = None,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        checks.integer(self._op, "out_caps", out_caps, 2)
        P, Q, R = pose_sizes(self._op, in_dim, out_dim, pose_rows)
        self.in_caps, self.out_caps, self.in_dim, self.out_dim = in_caps, out_caps, in_dim, out_dim
        self.pose_rows, self.num_iterations = pose_rows, num_iterations
        self.model, self.single_beta, self.eps, self.backend = model, single_beta, eps, backend

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(in_caps or 1, out_caps, *shape, **factory_kwargs))

        self.register_buffer("CONST_one", torch.empty((), **factory_kwargs))
        self.W, self.B, self.beta_use = parameter(Q, R), parameter(P, R), parameter()
        self.beta_ign = self.beta_use if single_beta else parameter()
        self._initialise()

    def _initialise(self) -> None:
        """As in the author's code, W starts with deviation 1 / Q, all other parameters with 0."""
        nn.init.ones_(self.CONST_one)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        nn.init.normal_(self.W, std=1 / self.W.shape[2])

    def forward(self, u: Tensor, scores: Tensor, mask: Tensor | None = None) -> ScoredCapsules:
        """See the class."""
        sizes = {"K": self.in_dim} if self.in_caps is None else {"I": self.in_caps, "K": self.in_dim}
        _arguments.sized(self._op, "u", u, "[B, I, K]", **sizes)
        _arguments.sized(self._op, "scores", scores, "[B, I]", B=u.shape[0], I=u.shape[1])
        checks.parameter_dtype(self._op, "scores", scores, "u", u)
        arguments.check_parameters(self._op, "u", u, (*u.shape[:2], self.out_caps, self.out_dim), {"mask": mask})
        f = torch.sigmoid(scores)
        f = f if mask is None else f.masked_fill(~mask, 0.0)
        both = self.beta_use + self.beta_ign
        ignored = (f[..., None] * self.beta_ign).sum(1)
        # Row p of a pose is extended by row p of the unit matrix, so that the product adds row p of B.
        rows = u.unflatten(2, (self.pose_rows, -1))
        unit = torch.eye(self.pose_rows, dtype=u.dtype, device=u.device).expand(*rows.shape[:3], -1)
        product = torch.cat([rows, unit], 3), torch.cat([self.W, self.B], 2)
        votes = votes_of(self._op, product, J=self.out_caps, mask=mask, backend=self.backend)
        center, precision, prior = votes.origin(f), None, None
        for _ in range(self.num_iterations):
            m = votes.moments(
                center=center, precision=precision, prior=prior, activation=f, second=True, return_weights=True
            )
            assert m.second is not None and m.weights is not None
            score = (m.weights * both).sum(1) - ignored
            mass = m.mass[..., None]
            share = 1 / (mass + self.eps)
            mean = (m.first + mass * center) * share
            shift = mean - center
            about_mean = (m.second - shift * (2 * m.first - mass * shift)) * share
            variance = not_negative(about_mean) + self.eps
            center, prior = mean, F.logsigmoid(score)
            if self.model == "gaussian":
                precision, prior = 1 / variance, prior - 0.5 * variance.log().sum(2)
            else:
                precision = torch.full_like(variance, 2.0)
        return ScoredCapsules(mean.to(u.dtype), score.to(u.dtype), variance.to(u.dtype))
