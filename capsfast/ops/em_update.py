"""The op of the EM update between two passes: the M-step (Hinton, Sabour, Frosst 2018, procedure 1).

``capsfast::em_update`` takes the moments of a pass about ``center`` (see :class:`capsfast.Moments`); beta_a and beta_u,
both [J], beta_u the mean of the components; and ``last``, the previous poses, None without momentum. It returns
``(poses [B, J, D], precision [B, J, D], score [B, J])``. The next pass takes precision, and score as ``prior``. In the
final iteration precision is empty and score holds the activations. csrc/ops/cpu/em_update.h has the formulas. The
definition consists of some thirty torch operations, which torch.compile fuses.

``capsfast::em_update_backward`` evaluates the step again and returns the gradients of the seven float tensors, empty
if not needed.
"""

from typing import Any

from torch import Tensor

from ..backend import choose_for_update
from ..calls import checks
from ..calls.options import EMOptions
from ..environment.private_torch import forward_level
from ..reference.em_update import em_update as reference
from .define import Op


def call(
    mass: Tensor,
    first: Tensor,
    second: Tensor,
    center: Tensor,
    beta_a: Tensor,
    beta_u: Tensor,
    last: Tensor | None,
    out_mask: Tensor | None,
    options: EMOptions,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """``(poses, precision, score)`` from the op if it can run, else from the definition.

    precision is None in the final iteration.
    """
    beta_a, beta_u = (beta if beta.dtype == mass.dtype else beta.to(mass.dtype) for beta in (beta_a, beta_u))
    tensors = (mass, first, second, center, beta_a, beta_u, last)
    chosen = _chosen(tensors[:4], out_mask, backend)
    if chosen is None:
        return reference(*tensors, out_mask, options)
    poses, precision, score = OP.kernels[chosen](*tensors, out_mask, *options)
    return poses, None if options.final else precision, score


def _chosen(moments: tuple[Tensor, ...], out_mask: Tensor | None, backend: str | None) -> str | None:
    """The backend of the op for a call, None for the definition. Compiled programs never hold the op.

    moments: mass, first, second and center; a user's own votes decide their dtypes and shapes.
    """
    mass, first, *_ = moments
    if not checks.is_eager(first) or forward_level() >= 0:
        return None
    if any(value.dtype != first.dtype for value in moments) or (out_mask is not None and out_mask.shape != mass.shape):
        return None
    return choose_for_update("capsfast.EMRouting", first, backend)


def _fake(a: Any) -> tuple[Tensor, ...]:
    shape = a.first.shape
    return a.first.new_empty(shape), a.first.new_empty(0 if a.final else shape), a.mass.new_empty(a.mass.shape)


OP = Op("em_update", ("capsfast.EMRouting",), _fake, cast=0, sharded=False, backends=("cpp", "triton"))
