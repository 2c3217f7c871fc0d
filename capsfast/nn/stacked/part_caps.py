"""Part capsules of an image, and the image drawn from their templates (Kosiorek et al. 2019, section 2.2)."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...calls import checks
from ...environment.private_torch import result
from .. import _arguments
from .._layer import Layer
from .affine import affine, inverse


@result
class Parts(NamedTuple):
    """poses ``[B, M, 2, 3]`` from a template to the image, presences ``[B, M]`` in (0, 1), features ``[B, M, F]``."""

    poses: Tensor
    presences: Tensor
    features: Tensor


class PartCaps(Layer):
    """Part capsules from feature maps: each part pools its numbers over the places by attention.

    Args:
        in_channels: channels of the feature maps.
        num_parts, features: M and F.
        noise: in training, uniform noise from -noise to noise is added to the logits of the presences.
        device, dtype: device and dtype of the parameters.

    Shapes: ``[B, in_channels, H, W]`` to :class:`Parts`.
    """

    def __init__(
        self, in_channels: int, num_parts: int = 24, features: int = 16, *, noise: float = 2.0, **factory_kwargs: Any
    ) -> None:
        super().__init__()
        self.num_parts, self.features, self.noise = num_parts, features, noise
        # For each part: a pose of 6 numbers, presence, features, attention.
        self.conv = nn.Conv2d(in_channels, num_parts * (6 + 1 + features + 1), 1, **factory_kwargs)

    def forward(self, maps: Tensor) -> Parts:
        maps_of_parts = self.conv(maps).flatten(2).unflatten(1, (self.num_parts, -1))  # [B, M, 8 + F, places]
        pooled = (maps_of_parts[:, :, :-1] * maps_of_parts[:, :, -1:].softmax(3)).sum(3)
        poses, presence, features = pooled.split((6, 1, self.features), 2)
        logit = presence.squeeze(2)
        if self.training and self.noise:
            logit = logit + self.noise * (2 * torch.rand_like(logit) - 1)
        return Parts(affine(poses), logit.sigmoid(), features.relu())


@result
class Drawn(NamedTuple):
    """log_likelihood ``[B]``, of all pixels; image ``[B, C, H, W]``, the mean of the mixture."""

    log_likelihood: Tensor
    image: Tensor


class TemplateMixture(Layer):
    """Draws an image: every pixel is a mixture of the parts' templates and a background (equations 1 to 4).

    Parameters: ``templates [M, C, h, w]`` and ``alpha [M, 1, h, w]``, both logits; layers for colours; the background.

    Args:
        num_parts, features: M and F of the parts.
        image_shape: (C, H, W).
        template_size: (h, w), or an int for both.
        pixel_std: standard deviation of a pixel about the value of its component.
        device, dtype: device and dtype of the parameters.

    Shapes: :class:`Parts` and ``images [B, C, H, W]`` to :class:`Drawn`.
    """

    def __init__(
        self,
        num_parts: int,
        features: int,
        image_shape: Sequence[int],
        template_size: int | Sequence[int] = 11,
        *,
        pixel_std: float = 0.2,
        **factory_kwargs: Any,
    ) -> None:
        super().__init__()
        h, w = _arguments.pair(self._op, "template_size", template_size)
        self.image_shape = _arguments.image_shape(self._op, image_shape)
        self.pixel_std = pixel_std
        channels = self.image_shape[0]
        self.templates = nn.Parameter(torch.empty(num_parts, channels, h, w, **factory_kwargs))
        self.alpha = nn.Parameter(torch.empty(num_parts, 1, h, w, **factory_kwargs))
        self.colour = nn.Sequential(
            nn.Linear(features, 32, **factory_kwargs),
            nn.ReLU(),
            nn.Linear(32, channels, **factory_kwargs),
            nn.Sigmoid(),
        )
        self.background = nn.Parameter(torch.empty(channels, **factory_kwargs))
        self.background_weight = nn.Parameter(torch.empty((), **factory_kwargs))
        self._initialise()

    def _initialise(self) -> None:
        for logits in (self.templates, self.alpha):
            nn.init.normal_(logits, std=0.1)
        for logits in (self.background, self.background_weight):
            nn.init.constant_(logits, -2.0)

    def drawn(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Image ``[B, M + 1, C, H, W]`` and share ``[B, M + 1, 1, H, W]`` of each component; background last."""
        B, M = parts.presences.shape
        channels, H, W = self.image_shape
        sheets = torch.cat([self.templates.sigmoid(), self.alpha.sigmoid()], 1)  # [M, C + 1, h, w]
        # A pixel of the image looks up its place in the template, so the grid takes the inverse of the pose.
        across, down, shift = inverse(parts.poses).flatten(0, 1)[:, None, None].unbind(-1)  # each [B M, 1, 1, 2]
        # The middles of the pixels, from -1 to 1. F.affine_grid takes no empty batch, and autocast rounds its result.
        x, y = (torch.linspace(1 / n - 1, 1 - 1 / n, n, dtype=shift.dtype, device=shift.device) for n in (W, H))
        grid = x[:, None] * across + (y[:, None, None] * down + shift)  # [B M, H, W, 2]
        laid = F.grid_sample(sheets.repeat(B, 1, 1, 1), grid, align_corners=False).unflatten(0, (B, M))
        values = laid[:, :, :-1] * self.colour(parts.features)[..., None, None]
        weights = laid[:, :, -1:] * parts.presences[..., None, None, None]
        values = torch.cat([values, self.background.sigmoid()[None, None, :, None, None].expand(B, 1, -1, H, W)], 1)
        weights = torch.cat([weights, self.background_weight.sigmoid().expand(B, 1, 1, H, W)], 1)
        return values, weights / weights.sum(1, keepdim=True)

    def forward(self, parts: Parts, images: Tensor) -> Drawn:
        if tuple(images.shape[1:]) != self.image_shape:
            raise ValueError(f"{self._op}: images must be [B, {self.image_shape}], got {checks.shape_of(images)}")
        values, share = self.drawn(parts)
        error = (values - images[:, None]) / self.pixel_std
        density = -0.5 * error.square() - math.log(self.pixel_std) - 0.5 * math.log(2 * math.pi)
        # All channels of a pixel come from the same component.
        log_share = share.clamp_min(torch.finfo(share.dtype).tiny).log()
        log_likelihood = (log_share + density.sum(2, keepdim=True)).logsumexp(1)
        return Drawn(log_likelihood.flatten(1).sum(1), (share * values).sum(1))
