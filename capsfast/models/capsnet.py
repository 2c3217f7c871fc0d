"""The capsule network of Sabour, Frosst, Hinton (2017)."""

from collections.abc import Sequence
from typing import Any

import torch

from ..nn import Decoder, _arguments
from ..nn.routing.names import RoutingChoice
from ._encoder import CapsuleEncoder


class CapsNet(CapsuleEncoder):
    """Convolution, primary capsules, class capsules, and a decoder (Sabour, Frosst, Hinton 2017, figures 1 and 2).

    For 28 x 28 images the defaults are the paper's: 8 215 568 parameters, 6 804 224 without the decoder.

    Parts: ``conv``, ``primary`` (:class:`capsfast.nn.PrimaryCaps`), ``routing``
    (:class:`capsfast.DynamicRouting` or :class:`capsfast.nn.RoutedCaps`), ``decoder``
    (:class:`capsfast.nn.Decoder` or None).

    Args:
        in_channels, image_size: channels and size of the images; an int or (height, width).
        num_classes: number of classes, J.
        conv_channels: channels of the first convolution.
        primary_groups, primary_dim: types and size of the primary capsules.
        digit_dim: size of the class capsules.
        num_iterations: iterations of the routing; None for its default, 3 for dynamic routing.
        routing: ``"dynamic"``, or another routing as for :class:`capsfast.nn.RoutedCaps`.
        reconstruction: whether there is a decoder.
        decoder_hidden: widths of the decoder's hidden layers.
        kernel_size: kernel of both convolutions; default 9, smaller for images below 19 pixels.
        conv_stride, primary_stride: strides of the first convolution and of the primary capsules. By default the first
            is 1; for images with a side above 44 pixels it grows until there are at most 14 x 14 places of primary
            capsules (with the default types 6272 capsules), as long as the short side allows it.
            ``model.routing.in_caps`` is the number of capsules.
        backend, device, dtype, routing_options: other options of :class:`capsfast.DynamicRouting` or RoutedCaps.

    Shapes: images ``[B, C, H, W]`` with values in [0, 1] and labels int64 ``[B]`` to :class:`CapsNetOutput`.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.

    Example:
        >>> model = capsfast.models.CapsNet(1, 28, num_classes=10, conv_channels=16, primary_groups=2)
        >>> lengths, capsules, reconstruction = model(torch.rand(4, 1, 28, 28))
        >>> lengths.shape, reconstruction.shape
        (torch.Size([4, 10]), torch.Size([4, 1, 28, 28]))
    """

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        conv_channels: int = 256,
        primary_groups: int = 32,
        primary_dim: int = 8,
        digit_dim: int = 16,
        num_iterations: int | None = None,
        routing: RoutingChoice = "dynamic",
        reconstruction: bool = True,
        decoder_hidden: Sequence[int] = (512, 1024),
        kernel_size: int | None = None,
        conv_stride: int | None = None,
        primary_stride: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__(
            in_channels,
            image_size,
            num_classes,
            digit_dim,
            conv_channels,
            primary_groups,
            primary_dim,
            kernel_size,
            conv_stride,
            primary_stride,
            num_iterations,
            routing,
            device,
            dtype,
            routing_options,
        )
        hidden = _arguments.sizes(self._op, "decoder_hidden", decoder_hidden, 0)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.decoder = (
            Decoder(num_classes, digit_dim, self.image_shape, hidden, **factory_kwargs) if reconstruction else None
        )
