"""Pretrained networks, and pictures in files as they take them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.files import Reader
from ..data.vision import torchvision
from ..models._network import Network
from .learner import Learner
from .networks import network_class

SIZES = ("in_channels", "image_size", "num_classes")


def open_pretrained(model: str, name: str) -> Learner:
    """A network from ``from_pretrained`` as a :class:`Learner`, in evaluation mode.

    Args:
        model: as for :class:`Learner`.
        name: as for ``from_pretrained`` of the model: a network that comes with the package, a folder, a repository.

    Raises:
        ValueError: a network that has no ``from_pretrained``, or whose images are not square.
        ValueError, ModuleNotFoundError, FileNotFoundError, RuntimeError: as ``from_pretrained``.
    """
    op = "capsfast.train.open_pretrained"
    made = network_class(op, model)
    if not issubclass(made, Network):
        raise ValueError(f"{op}: model must be one of capsfast.models, or derive from one of them, got {model}")
    network: Any = made.from_pretrained(name)
    channels, height, width = network.image_shape
    if height != width:
        raise ValueError(f"{op}: the images of {name} must be square, got {height} x {width}")
    options = network._options(op)
    names, classes = network.class_names, options.get("num_classes", 10)
    options = {each: value for each, value in options.items() if each not in SIZES}
    learner = Learner(model, channels, height, classes, class_names=names, options=options)
    learner.model = network
    return learner.eval()


def read_picture(path: Path | str, learner: Learner) -> Tensor:
    """A picture as the network takes it, ``[1, C, H, W]`` in [0, 1]: resized to a square, in grey or colour.

    Raises:
        ValueError: the file is not a picture, or the network does not take images of 1 or 3 channels.
    """
    channels, size = learner.sizes["in_channels"], learner.sizes["image_size"]
    if channels not in (1, 3):
        raise ValueError(f"capsfast.train.read_picture: pictures have 1 or 3 channels, the network takes {channels}")
    image = Reader(channels, None)(str(path))
    image = image.float() / 255 if image.dtype == torch.uint8 else image
    resized: Tensor = torchvision("transforms.v2.functional").resize(image, [size, size], antialias=True)
    return resized.clamp(0, 1)[None]
