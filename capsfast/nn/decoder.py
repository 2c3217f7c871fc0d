"""Decoders, which make images from capsules."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from . import _arguments
from ._arguments import FactoryKwargs
from ._layer import Layer
from .readout import Mask

FIRST = 16  # feature maps that a ConvDecoder starts from


def perceptron(widths: Sequence[int], layer: Callable[[int, int], nn.Module], last: nn.Module) -> nn.Sequential:
    """Layers between these widths with ReLU between them, and ``last`` behind the last layer."""
    layers = [module for before, after in pairwise(widths) for module in (layer(before, after), nn.ReLU())]
    return nn.Sequential(*layers[:-1], last)


class _MaskedDecoder(Layer):
    """Selects the capsules that an image is decoded from."""

    def __init__(
        self, num_caps: int, dim: int, image_shape: Sequence[int], masked: bool, class_independent: bool
    ) -> None:
        super().__init__()
        self.image_shape = _arguments.image_shape(self._op, image_shape)
        if class_independent and not masked:
            raise ValueError(f"{self._op}: class_independent needs masked=True, got masked=False")
        self.num_caps, self.dim = num_caps, dim
        self.class_independent = class_independent
        self.mask = Mask() if masked else None
        self.in_features = dim if class_independent else num_caps * dim

    def _chosen(self, capsules: Tensor, labels: Tensor | None) -> Tensor:
        """``[B, num_caps, dim]`` to ``[B, in_features]``."""
        sizes = {"num_caps": self.num_caps, "dim": self.dim}
        _arguments.sized(self._op, "capsules", capsules, "[B, num_caps, dim]", **sizes)
        if self.mask is None:
            if labels is not None:
                raise ValueError(f"{self._op}: labels need masked=True, which keeps the capsule they name")
            return capsules.flatten(1)
        kept: Tensor = self.mask(capsules, labels)
        return kept.sum(1) if self.class_independent else kept.flatten(1)


class Decoder(_MaskedDecoder):
    """Three fully connected layers from capsules to an image (Sabour, Frosst, Hinton 2017, section 4.1).

    Parameters: ``layers``, linear layers with ReLU between them and a sigmoid at the end.

    Args:
        num_caps, dim: number and size of the capsules, J and D.
        image_shape: (channels, height, width).
        hidden: widths of the hidden layers.
        masked: set all capsules to 0 first except the capsule of the label (without labels: the longest capsule).
        class_independent: decode only the components of the kept capsule, so that the decoder does not see its class.
        device, dtype: device and dtype of the parameters.

    Shapes: ``capsules [B, num_caps, dim]``, ``labels`` int64 ``[B]`` to images in [0, 1] of
    ``[B, channels, height, width]``.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    def __init__(
        self,
        num_caps: int,
        dim: int,
        image_shape: Sequence[int] = (1, 28, 28),
        hidden: Sequence[int] = (512, 1024),
        *,
        masked: bool = True,
        class_independent: bool = False,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__(num_caps, dim, image_shape, masked, class_independent)
        C, H, W = self.image_shape
        widths = [self.in_features, *_arguments.sizes(self._op, "hidden", hidden, 0), C * H * W]
        self.layers = perceptron(widths, partial(nn.Linear, **factory_kwargs), nn.Sigmoid())

    def forward(self, capsules: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.layers(self._chosen(capsules, labels)).unflatten(1, self.image_shape)  # type: ignore[no-any-return]


class ConvDecoder(_MaskedDecoder):
    """A linear layer makes small feature maps, and transposed convolutions double them to the size of the image.

    With ``class_independent=True`` it is the decoder of Rajasegaran et al. (2019), from the authors' code: ReLU and
    batch normalisation after the linear layer, ReLU after the last convolution, nothing between the convolutions.

    Parameters: ``start`` (linear), ``norm``, ``convs`` (3 x 3). Weights start as Glorot's uniform distribution, biases
    at 0.

    Args:
        channels: channels after the first convolution, which keeps the size, and after each doubling convolution.
            Default: 64, halved down to 8, with as many doublings as the shorter side needs from at most 8 places.
        num_caps, dim, image_shape, masked, class_independent, device, dtype, and errors: as in :class:`Decoder`.

    Shapes: as for Decoder, but pixels are only bounded below, by 0.
    """

    def __init__(
        self,
        num_caps: int,
        dim: int,
        image_shape: Sequence[int] = (1, 28, 28),
        channels: Sequence[int] | None = None,
        *,
        masked: bool = True,
        class_independent: bool = False,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__(num_caps, dim, image_shape, masked, class_independent)
        C, H, W = self.image_shape
        if channels is None:
            doublings = max(0, (min(H, W) - 1).bit_length() - 3)
            channels = [max(8, 64 >> n) for n in range(1 + doublings)]
        channels = _arguments.sizes(self._op, "channels", channels)
        sizes = [(H, W)]
        for _ in channels[1:]:
            H, W = (H + 1) // 2, (W + 1) // 2
            sizes.insert(0, (H, W))
        self.sizes = (*sizes, sizes[-1])
        self.start = nn.Linear(self.in_features, FIRST * H * W, **factory_kwargs)
        self.norm = nn.BatchNorm2d(FIRST, eps=1e-3, momentum=0.2, **factory_kwargs)
        same = {0, len(channels)}  # which keep the size
        self.convs = nn.ModuleList(
            nn.ConvTranspose2d(before, after, 3, 1 if n in same else 2, 1 if n in same else 0, **factory_kwargs)
            for n, (before, after) in enumerate(pairwise([FIRST, *channels, C]))
        )
        self._initialise()

    def _initialise(self) -> None:
        for conv in (self.start, *self.convs):
            nn.init.xavier_uniform_(conv.weight)
            nn.init.zeros_(conv.bias)

    def forward(self, capsules: Tensor, labels: Tensor | None = None) -> Tensor:
        features = F.relu(self.start(self._chosen(capsules, labels)))
        image: Tensor = self.norm(features.unflatten(1, (FIRST, *self.sizes[0])))
        for (height, width), conv in zip(self.sizes, self.convs, strict=True):
            # A doubled image has one row and column too many at its end, two if the size is odd.
            image = conv(image)[..., :height, :width]
        return F.relu(image)
