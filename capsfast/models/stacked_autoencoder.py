"""The stacked capsule autoencoder of Kosiorek, Sabour, Teh, Hinton (2019)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ..calls import checks
from ..environment.private_torch import result
from ..nn._arguments import FactoryKwargs
from ..nn.stacked.object_caps import Explained, ObjectCaps, Objects, explain
from ..nn.stacked.part_caps import Drawn, PartCaps, Parts, TemplateMixture
from ..nn.stacked.set_transformer import SetTransformer
from ._images import ImageNetwork


@result
class StackedOutput(NamedTuple):
    """The parts and objects that the two autoencoders find, and how well these explain the image and the parts."""

    parts: Parts
    objects: Objects
    drawn: Drawn
    explained: Explained

    @property
    def reconstruction(self) -> Tensor:
        """``[B, C, H, W]``."""
        return self.drawn.image


@dataclass(frozen=True)
class Sparsity:
    """Weights of the terms that make objects specialise (section 2.4).

    Each of ``num_classes`` classes should get a share of the objects, and the objects of one class should explain an
    image. Prior: squared distances of the sum of presences in an image from K / classes, and of the sum of presences of
    an object over B images from B / classes. Posterior: the shares of the objects in the parts get little entropy in an
    image, and much over all images. deformation: weight of the sample-dependent parts of object-part relations.
    """

    prior_within: float = 2.0
    prior_between: float = 0.35
    posterior_within: float = 0.7
    posterior_between: float = 0.2
    deformation: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = checks.plain(getattr(self, field.name))
            object.__setattr__(self, field.name, value)
            checks.positive("capsfast.models.Sparsity", field.name, value, zero=True)


class StackedCapsuleAutoencoder(ImageNetwork):
    """Images to parts to objects, and back, without labels (Kosiorek, Sabour, Teh, Hinton 2019).

    Part capsules find templates and their poses in the image, and learn to draw the image. Object capsules learn to
    explain the poses of the parts; no gradient flows back into the parts. The present objects tell the class:
    :func:`capsfast.train.cluster_accuracy`.

    Parts: ``conv``, and ``part_caps``, ``templates``, ``encoder`` and ``object_caps`` from ``capsfast.nn.stacked``.

    Args:
        in_channels, image_size: channels and size of the images.
        num_classes: number of classes that the sparsity terms assume.
        num_parts, num_objects: M and K.
        conv_channels: channels of the four 3 x 3 convolutions, of which the first two have stride 2.
        part_features: numbers of a part besides pose and presence.
        template_size: size of the templates in pixels.
        dim, hidden: size of the description and width of the hidden layers of an object.
        pixel_std: standard deviation in the image likelihood.
        noise: uniform noise on the presence logits in training.
        sparsity: weights of the sparsity terms.
        device, dtype: device and dtype of the parameters.

    Shapes: images ``[B, C, H, W]`` with values in [0, 1] to :class:`StackedOutput`.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        num_parts: int = 24,
        num_objects: int = 24,
        conv_channels: int = 128,
        part_features: int = 16,
        template_size: int | Sequence[int] = 11,
        dim: int = 32,
        hidden: int = 128,
        pixel_std: float = 0.2,
        noise: float = 2.0,
        sparsity: Sparsity | None = None,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        self._sees(in_channels, image_size)
        self.num_classes = num_classes
        self.num_objects = num_objects
        self.sparsity = Sparsity() if sparsity is None else sparsity
        layers: list[nn.Module] = []
        for n, stride in enumerate((2, 2, 1, 1)):
            channels = in_channels if n == 0 else conv_channels
            layers += [nn.Conv2d(channels, conv_channels, 3, stride, padding=1, **factory_kwargs), nn.ReLU()]
        self.conv = nn.Sequential(*layers)
        self.part_caps = PartCaps(conv_channels, num_parts, part_features, noise=noise, **factory_kwargs)
        self.templates = TemplateMixture(
            num_parts, part_features, self.image_shape, template_size, pixel_std=pixel_std, **factory_kwargs
        )
        described = 6 + 1 + part_features + self.templates.templates[0].numel() + self.templates.alpha[0].numel()
        self.encoder = SetTransformer(described, 256, num_objects, **factory_kwargs)
        self.object_caps = ObjectCaps(
            256, num_objects, num_parts, dim=dim, hidden=hidden, noise=noise, **factory_kwargs
        )

    def find_parts(self, images: Tensor) -> Parts:
        self._check(images)
        return self.part_caps(self.conv(images))

    def find_objects(self, parts: Parts) -> Objects:
        """Objects of parts, which count as given: no gradient goes back to them."""
        poses, presences, features = (tensor.detach() for tensor in parts)
        sheets = torch.cat([self.templates.templates.flatten(1), self.templates.alpha.flatten(1)], 1).detach().sigmoid()
        members = torch.cat(
            [poses.flatten(2), presences[..., None], features, sheets.expand(poses.shape[0], -1, -1)], 2
        )
        return self.object_caps(self.encoder(members, presences))

    def forward(self, images: Tensor, target: Tensor | None = None) -> StackedOutput:
        """``target``: what is to be drawn, with values in [0, 1], where the network sees something else."""
        parts = self.find_parts(images)
        objects = self.find_objects(parts)
        explained = explain(objects, parts.poses.detach(), parts.presences.detach())
        return StackedOutput(parts, objects, self.templates(parts, images if target is None else target), explained)

    def loss(self, output: StackedOutput) -> dict[str, Tensor]:
        """The terms whose sum is to be minimised, means over the batch, under their names."""
        K, classes, weights = self.num_objects, self.num_classes, self.sparsity
        presences, posterior = output.objects.presences, output.explained.posterior.sum(1)  # [B, K] both
        B = presences.shape[0]
        within, between = presences.sum(1) - K / classes, presences.sum(0) - B / classes
        return {
            "image": -output.drawn.log_likelihood.mean(),
            "parts": -output.explained.log_likelihood.mean(),
            "prior_within": weights.prior_within * within.square().mean(),
            "prior_between": weights.prior_between * between.square().mean(),
            "posterior_within": weights.posterior_within * _entropy(posterior).mean(),
            "posterior_between": -weights.posterior_between * _entropy(posterior.sum(0)),
            "deformation": weights.deformation * output.objects.deformation,
        }


def _entropy(weights: Tensor) -> Tensor:
    """``[..., K]`` to ``[...]``, of the weights divided by their sum."""
    share = weights / weights.sum(-1, keepdim=True).clamp_min(1e-8)
    return -(share * share.clamp_min(1e-8).log()).sum(-1)
