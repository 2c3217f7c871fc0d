"""The op of what EM routing does between two passes: the M-step (Hinton, Sabour, Frosst 2018, procedure 1).

``capsfast::em_update`` takes the moments of a pass about ``center`` (see :class:`capsfast.Moments`), beta_a and beta_u
of the routing and ``last``, the poses before, None for 0. It returns ``(poses [B, J, D], precision [B, J, D],
score [B, J])``: precision and score, as ``prior``, are for the next pass. In the final iteration precision is empty and
score holds the activations. csrc/ops/cpu/em_update.h has the formulas. It has kernels on the CPU, where some thirty
operations of torch take longer than a pass over a small batch. A compiler fuses the definition.

``capsfast::em_update_backward`` returns the gradients of the seven float tensors, each empty if its need_ flag is
false. It computes again what it needs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks, native
from ..backend import select
from ..options import EMOptions
from ..reference.em_update import em_update as reference
from ._glue import check_shapes, fake_gradients
from ._register import Contract, define_cpp


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
) -> tuple[Tensor, Tensor, Tensor]:
    """``(poses, precision, score)`` from the op where that can run, else from the definition."""
    beta_a, beta_u = (beta if beta.dtype == mass.dtype else beta.to(mass.dtype) for beta in (beta_a, beta_u))
    tensors = (mass, first, second, center, beta_a, beta_u, last)
    if not _serves(mass, backend):
        return reference(*tensors, out_mask, options)
    if checks.autocast_dtype(mass.device) is None:
        return _op(*tensors, None, out_mask, *options)  # type: ignore[no-any-return]
    with torch.autocast(mass.device.type, enabled=False):
        return _op(*tensors, None, out_mask, *options)  # type: ignore[no-any-return]


def _serves(mass: Tensor, backend: str | None) -> bool:
    """Whether mass is a plain tensor of the CPU, whose numbers are there; no program has the op."""
    if native.extension is None or not checks.can_be_looked_at(mass):
        return False
    return select("capsfast.EMRouting", mass.device, backend) == "cpp"


def _fake(mass: Tensor, first: Tensor, second: Tensor, center: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    beta_a, beta_u, last, _, out_mask = rest[:5]
    options = EMOptions(*rest[5:])
    torch._check(first.dim() == 3, lambda: "first must be [B, J, D]")
    B, J, D = first.shape
    given = {"prior": mass, "query": second, "center": center, "out_mask": out_mask}
    check_shapes(given | {"precision": last}, (B, 0, J, D), ())
    torch._check(beta_a.dim() == 1 and beta_u.dim() in (1, 2), lambda: "beta_a must be [J], beta_u [J] or [J, D]")
    precision = first.new_empty(0) if options.final else first.new_empty(B, J, D)
    return first.new_empty(B, J, D), precision, first.new_empty(B, J)


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    # Three gradients of outputs, then the tensors.
    return fake_gradients(args[3:10], args[-7:])


def _received(
    given: Sequence[Tensor | None], tensors: Sequence[Tensor | None], saved: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    # torch.compile gives zeros for what the final iteration leaves empty.
    return tuple(None if gradient is None or gradient.dim() == 1 else gradient for gradient in given)


CONTRACT = Contract(
    name="em_update",
    inputs=("mass", "first", "second", "center", "beta_a", "beta_u"),
    parameters=("last",),
    options="float floor, float momentum, bool isotropic, str cost, float cost_scale, str nonlinearity, "
    "float inverse_temperature, bool final",
    requests=(),
    outputs=("poses", "precision", "score"),
    differentiable=3,
    saved=(),
    optional=("poses", "precision", "score"),
    fake=_fake,
    fake_backward=_fake_backward,
    received=_received,
    called="EMRouting",
)
_op = define_cpp(CONTRACT)
