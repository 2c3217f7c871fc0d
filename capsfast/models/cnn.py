"""The convolutional baseline."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn
from typing_extensions import Unpack

from ..nn import _arguments
from ..nn._arguments import FactoryKwargs
from ..nn.decoder import perceptron
from ..nn.routing.base import Capsules
from ._images import DecodedCapsules


class CNN(DecodedCapsules):
    """Convolutions, fully connected layers and a softmax: the baseline of Sabour, Frosst, Hinton (2017), section 5.

    With the defaults and 28 x 28 images it has the paper's 35.4 million parameters. It has no capsules: its activations
    are the probabilities of the classes, and its class capsules have one component, the logarithm of the probability.

    Parts: ``convs``, ``hidden``, ``dropout``, ``classes``, ``decoder`` (None).

    Args:
        in_channels, image_size, num_classes, device, dtype: as in :class:`CapsNet`.
        channels: channels of the convolutions. They have stride 1, keep the size of the image, and a ReLU follows each.
        kernel_size: kernel of the convolutions, odd.
        hidden: widths of the fully connected layers before the output layer.
        dropout: dropout probability after the last hidden layer.

    Shapes: images ``[B, C, H, W]`` to :class:`CapsNetOutput`: probabilities ``[B, J]``, their logarithms
    ``[B, J, 1]``, None.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    # A probability that is rounded to 0 has no gradient, but its logarithm has one.
    poses_are_log_probabilities = True

    def __init__(
        self,
        in_channels: int = 1,
        image_size: int | Sequence[int] = 28,
        num_classes: int = 10,
        *,
        channels: Sequence[int] = (256, 256, 128),
        kernel_size: int = 5,
        hidden: Sequence[int] = (328, 192),
        dropout: float = 0.5,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        op = self._op
        height, width = self._sees(in_channels, image_size)
        if kernel_size % 2 == 0:
            raise ValueError(f"{op}: kernel_size must be odd, so that images keep their size, got {kernel_size}")
        channels = _arguments.sizes(op, "channels", channels)
        hidden = _arguments.sizes(op, "hidden", hidden)
        if dropout >= 1:
            raise ValueError(f"{op}: dropout must be below 1, got {dropout}")
        conv = partial(nn.Conv2d, kernel_size=kernel_size, padding=kernel_size // 2, **factory_kwargs)
        self.convs = perceptron((in_channels, *channels), conv, nn.ReLU())
        features = channels[-1] * height * width
        self.hidden = perceptron((features, *hidden), partial(nn.Linear, **factory_kwargs), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.classes = nn.Linear(hidden[-1], num_classes, **factory_kwargs)
        self.decoder = None

    def classify(self, images: Tensor) -> Capsules:
        """The classes of ``images [B, C, H, W]``: log probabilities as poses ``[B, J, 1]``, probabilities."""
        self._check(images)
        features = self.hidden(self.convs(images).flatten(1))
        logits = self.classes(self.dropout(features))
        return Capsules(logits.log_softmax(1)[:, :, None], logits.softmax(1))
