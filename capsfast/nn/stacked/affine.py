"""Affine maps of the plane from six free numbers, as ``[..., 2, 3]`` matrices."""

import torch
from torch import Tensor

LEAST_SCALE = 1e-2


def affine(numbers: Tensor) -> Tensor:
    """``[..., 6]`` of any size to ``[..., 2, 3]``: scale, shear and rotation, then a translation.

    The numbers are, squashed into their ranges: two scales in (0.01, 1.01), an angle in (-pi, pi), a shear and two
    translations in (-1, 1). Every map has an inverse. The image is the square from -1 to 1.
    """
    sx, sy, angle, shear, tx, ty = numbers.unbind(-1)
    sx, sy = sx.sigmoid() + LEAST_SCALE, sy.sigmoid() + LEAST_SCALE
    angle, shear, tx, ty = torch.pi * angle.tanh(), shear.tanh(), tx.tanh(), ty.tanh()
    cos, sin = angle.cos(), angle.sin()
    # rotation [[cos, -sin], [sin, cos]] times [[sx, shear sy], [0, sy]]
    top = torch.stack([cos * sx, (cos * shear - sin) * sy, tx], -1)
    bottom = torch.stack([sin * sx, (sin * shear + cos) * sy, ty], -1)
    return torch.stack([top, bottom], -2)


def compose(outer: Tensor, inner: Tensor) -> Tensor:
    """``outer(inner(x))`` of maps ``[..., 2, 3]``."""
    linear = outer[..., :2] @ inner[..., :2]
    return torch.cat([linear, outer[..., :2] @ inner[..., 2:] + outer[..., 2:]], -1)


def inverse(maps: Tensor) -> Tensor:
    """The inverse of ``[..., 2, 3]``."""
    (a, b, tx), (c, d, ty) = (row.unbind(-1) for row in maps.unbind(-2))
    determinant = a * d - b * c
    top = torch.stack([d, -b, b * ty - d * tx], -1)
    bottom = torch.stack([-c, a, c * tx - a * ty], -1)
    return torch.stack([top, bottom], -2) / determinant[..., None, None]
