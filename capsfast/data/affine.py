"""Random shifts, rotations, scales and shears of a batch of images."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import checks

COLUMNS = 6  # numbers drawn for an image: two shifts, rotation, two scales, shear


@dataclass(frozen=True)
class RandomAffine:
    """Uniform draws within plus and minus the given limits, onto a black canvas.

    Args:
        shift: pixels along each axis, whole ones. The 2 of Sabour, Frosst, Hinton (2017) is the training default.
        rotation: degrees.
        scale: fraction; each axis draws its own factor from [1 - scale, 1 + scale].
        shear: pixels sideways for each pixel of height.
        canvas: pixels of black added on every side first.

    Raises:
        ValueError: a negative limit, or a scale of 1 or more.
    """

    shift: int = 0
    rotation: float = 0.0
    scale: float = 0.0
    shear: float = 0.0
    canvas: int = 0
    columns = COLUMNS

    def __post_init__(self) -> None:
        for name in ("shift", "rotation", "scale", "shear", "canvas"):
            if getattr(self, name) < 0:
                got = checks.shown(getattr(self, name))
                raise ValueError(f"capsfast.data.RandomAffine: {name} must not be negative, got {got}")
        if self.scale >= 1:
            raise ValueError(f"capsfast.data.RandomAffine: scale must be below 1, got {checks.shown(self.scale)}")

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """``images [B, C, H, W]`` and ``draws [B, 6]`` in [0, 1) to ``[B, C, H + 2 canvas, W + 2 canvas]``."""
        offsets = (draws[:, :2] * (2 * self.shift + 1)).long() - self.shift
        if self.rotation or self.scale or self.shear:
            signed = 2 * draws - 1
            return warped(
                F.pad(images, [self.canvas] * 4),
                offsets,
                torch.deg2rad(self.rotation * signed[:, 2]),
                1 + self.scale * signed[:, 3:5],
                self.shear * signed[:, 5],
            )
        return shifted(images, offsets, self.canvas)


def shifted(images: Tensor, offsets: Tensor, canvas: int = 0) -> Tensor:
    """``images [B, C, H, W]`` moved by ``offsets [B, 2]`` whole pixels (right, down), without interpolation."""
    H, W = images.shape[2:]
    reach = int(offsets.abs().max()) if len(offsets) else 0
    padded = F.pad(images, [canvas + reach] * 4)
    rows = torch.arange(H + 2 * canvas) + reach - offsets[:, 1:]  # [B, H]
    columns = torch.arange(W + 2 * canvas) + reach - offsets[:, :1]  # [B, W]
    sample = torch.arange(len(images))[:, None, None]
    # Indices on both sides of a slice put the channels last.
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


def warped(images: Tensor, offsets: Tensor, angle: Tensor, scale: Tensor, shear: Tensor) -> Tensor:
    """``images [B, C, H, W]`` scaled, sheared and rotated about the centre, then moved, each by its own numbers.

    offsets ``[B, 2]`` pixels right and down, angle ``[B]`` radians, clockwise on the screen, scale ``[B, 2]``,
    shear ``[B]``. Bilinear; what comes from outside is black.
    """
    H, W = images.shape[2:]
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    rotate = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    skew = torch.stack([one, shear, zero, one], 1).view(-1, 2, 2)
    # Of a place in the result, affine_grid wants to know where it came from.
    back = torch.linalg.inv(rotate @ skew @ torch.diag_embed(scale))
    half = torch.tensor([W / 2, H / 2])  # grid coordinates run from -1 to 1
    move = -(back @ offsets[:, :, None].to(back))[:, :, 0] / half
    theta = torch.cat([back * half / half[:, None], move[:, :, None]], 2)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
