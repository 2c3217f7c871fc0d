"""Routing of vectors in sequences by what each input vector is worth to each output vector."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from .. import passes
from ..calls import arguments, checks
from ..calls.options import Backend
from . import _arguments
from ._arguments import FactoryKwargs
from ._layer import Layer


class VectorRouting(Layer):
    """Routes input vectors to the output vectors that predict them best (Heinsen 2022).

    With ``s_i = u_i / sqrt(I)``, votes ``V_ij = F2^T (F1_j * s_i) + b_j`` and ``f_i = sigmoid(A_i . s_i + a_i)``, each
    iteration is::

        p_j    = G2_j * (G1^T LayerNorm(v_j)) + g_j               what output vector j predicts of the inputs
        R_ij   = softmax_j(logsigmoid(S_ij (u_i . p_j) + t_ij))   in the first iteration 1 / J
        phi_ij = f_i (use_ij R_ij - ignore_ij (1 - R_ij))         benefit less cost
        v_j    = sum_i phi_ij V_ij

    The last ``v`` goes through the LayerNorm too, which has no parameters and, where D is 1, is left out. phi
    ``[B, I, J]`` is in memory; the votes are not, nor a matrix for each output vector: F1 and F2 do not depend on i, so
    each iteration is one :func:`capsfast.votes_pass` over ``s``, and F1 and F2 multiply its sums.

    Parameters, with the names and shapes of the author's ``EfficientVectorRouting``, whose state dict loads here: ``W_A
    [I, K]`` and ``B_A [I]`` (A, a); ``W_F1 [J, K]``, ``W_F2 [K, D]`` and ``B_F2 [J, D]`` (F1, F2, b); ``W_G1 [D, K]``,
    ``W_G2 [J, K]`` and ``B_G2 [J, K]`` (G1, G2, g); ``W_S`` and ``B_S [I, J]`` (S, t); ``beta_use`` and ``beta_ign
    [I, J]``. For any number of inputs, I is replaced by 1, and the last two are the results of
    ``compute_beta_use`` and ``compute_beta_ign``, two ``nn.Linear(K, J)``. The buffer
    ``CONST_ones_over_n_out [J]`` is 1 / J.

    Source: "An Algorithm for Routing Vectors in Sequences", arXiv:2211.11754; votes, predictions and scores as in the
    author's efficient form.

    Args:
        in_caps: I; None for any number, which calls may change.
        out_caps: J, at least 2.
        in_dim, out_dim: sizes K of an input and D of an output vector.
        num_iterations: at least 1.
        normalize: the LayerNorm of the result.
        backend: see :func:`capsfast.dynamic_routing`.
        device, dtype: of the parameters.

    Shapes: u ``[B, I, K]`` and mask ``[B, I]``, bool, to ``[B, J, D]``. False in the mask takes an input vector out: it
    has no influence, whatever it holds, and I counts the others, so that a padded sequence has the result of the
    sequence without its padding. Without any input vector the result is 0.

    Raises:
        ValueError, TypeError: a size or an option that does not fit; in a call, a shape, a dtype or a device.
    """

    CONST_ones_over_n_out: Tensor

    def __init__(
        self,
        in_caps: int | None,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        num_iterations: int = 2,
        *,
        normalize: bool = True,
        backend: Backend | None = None,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        checks.integer(self._op, "out_caps", out_caps, 2)
        self.in_caps, self.out_caps, self.in_dim, self.out_dim = in_caps, out_caps, in_dim, out_dim
        self.num_iterations, self.normalize, self.backend = num_iterations, normalize, backend

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, **factory_kwargs))

        I, J, K, D = in_caps or 1, out_caps, in_dim, out_dim
        self.register_buffer("CONST_ones_over_n_out", torch.empty(J, **factory_kwargs))
        self.W_A, self.B_A = parameter(I, K), parameter(I)
        self.W_F1, self.W_F2, self.B_F2 = parameter(J, K), parameter(K, D), parameter(J, D)
        self.W_G1, self.W_G2, self.B_G2 = parameter(D, K), parameter(J, K), parameter(J, K)
        self.W_S, self.B_S = parameter(I, J), parameter(I, J)
        if in_caps is None:
            self.compute_beta_use = nn.Linear(K, J, **factory_kwargs)
            self.compute_beta_ign = nn.Linear(K, J, **factory_kwargs)
        else:
            self.beta_use, self.beta_ign = parameter(I, J), parameter(I, J)
        self._initialise()

    def _initialise(self) -> None:
        """Initialises all parameters, except those of parts, with the author's deviations."""
        nn.init.constant_(self.CONST_ones_over_n_out, 1 / self.out_caps)
        K, D = self.in_dim, self.out_dim
        deviations = {"W_A": 2 * K**-0.5, "W_F2": 2 * K**-0.5, "W_G1": D**-0.5, "W_S": K**-0.5}
        for name, parameter in self.named_parameters(recurse=False):
            nn.init.normal_(parameter, std=0.0 if name.startswith("B_") else deviations.get(name, 1.0))

    def forward(self, u: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        sizes = {"K": self.in_dim} if self.in_caps is None else {"I": self.in_caps, "K": self.in_dim}
        _arguments.sized(self._op, "u", u, "[B, I, K]", **sizes)
        checks.same_device(self._op, "u", u, "W_A", self.W_A)
        checks.same_dtype(self._op, "u", u, "W_A", self.W_A)
        if self.in_caps is None and u.shape[1] == 0:
            raise ValueError(f"{self._op}: u must hold at least one input vector, got {checks.shape_of(u)}")
        arguments.check_parameters(self._op, "u", u, (*u.shape[:2], self.out_caps, self.out_dim), {"mask": mask})
        number: int | Tensor = u.shape[1]
        if mask is not None:
            u = u.masked_fill(~mask[..., None], 0.0)
            number = mask.sum(1).clamp_min(1).to(u.dtype)[:, None, None]
        use, ignore = self._betas(u)
        both = use + ignore
        s = u * number**-0.5
        f = torch.sigmoid((s * self.W_A).sum(2) + self.B_A)
        f = (f if mask is None else f.masked_fill(~mask, 0.0))[..., None]
        v = self._weighted(s, f * (both * self.CONST_ones_over_n_out - ignore))
        for _ in range(self.num_iterations - 1):
            predicted = self._normalized(v) @ self.W_G1 * self.W_G2 + self.B_G2
            R = F.logsigmoid(u @ predicted.transpose(1, 2) * self.W_S + self.B_S).softmax(2)
            v = self._weighted(s, f * (both * R - ignore))
        return self._normalized(v) if self.normalize else v

    def _betas(self, u: Tensor) -> tuple[Tensor, Tensor]:
        if self.in_caps is None:
            return self.compute_beta_use(u), self.compute_beta_ign(u)
        return self.beta_use, self.beta_ign

    def _weighted(self, s: Tensor, phi: Tensor) -> Tensor:
        """``sum_i phi_ij V_ij``."""
        # Inputs of size 1 for J are votes that all output vectors share. For 16 bits the sums come in float32.
        moments = passes.votes_pass(s[:, :, None], logits=phi, normalize="none", backend=self.backend)
        mass, first = moments.mass.to(self.W_F1.dtype), moments.first.to(self.W_F1.dtype)
        return first * self.W_F1 @ self.W_F2 + mass[..., None] * self.B_F2

    def _normalized(self, v: Tensor) -> Tensor:
        return F.layer_norm(v, (self.out_dim,)) if self.out_dim > 1 else v
