"""Primary capsules by a depthwise convolution."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from ._arguments import Made
from .primary_caps import PrimaryCaps


class DepthwisePrimaryCaps(PrimaryCaps):
    """Primary capsules: a depthwise convolution, whose channels become squashed capsules (Mazzia et al. 2021).

    Every feature map has its own filter. With a kernel as large as the maps there is one place, and ``types`` capsules
    in all.

    Parameters: ``conv.weight [types·dim, 1, *kernel_size]`` and ``conv.bias [types·dim]``. Channel ``t·dim + k`` is
    component k of capsule type t.

    Args:
        types: capsules at each place, C.
        dim: size of a capsule, K.
        kernel_size, stride: kernel and stride of the convolution; an int or two ints (vertical, horizontal).
        bias: whether the convolution has a bias.
        squash, eps: see :func:`capsfast.squash`; the paper's is ``"exp"``.
        flatten: return a list of capsules; False: an image of capsules, as :class:`ConvCaps2d` takes it.
        device, dtype: device and dtype of the parameters.

    Shapes: ``[B, types·dim, H, W]`` to ``u [B, types·H'·W', dim]`` with the capsules in the order (type, y, x);
    without ``flatten`` to ``[B, types, dim, H', W']``.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    _depthwise = True

    def __init__(
        self,
        types: int,
        dim: int,
        kernel_size: int | Sequence[int] = 9,
        stride: int | Sequence[int] = 1,
        *,
        bias: bool = True,
        squash: str = "exp",
        eps: float = 1e-8,
        flatten: bool = True,
        **made: Unpack[Made],
    ) -> None:
        options: dict[str, Any] = {"bias": bias, "squash": squash, "eps": eps, "flatten": flatten}
        super().__init__(types * dim, types, dim, kernel_size, stride, **options, **made)
