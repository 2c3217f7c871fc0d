"""Dropout of primary capsules and of a decoder's hidden units (Srivastava et al. 2014), in any network that has them.

Hooks, so that networks and their checkpoints know nothing of it. Objects and not closures: a learner is pickled when
processes are started.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..nn.routing.base import Capsules

LAYERS = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)


class DropCapsules:
    """Sets whole capsules to 0. Those left are longer by ``1 / (1 - p)``; where they have activations beside their
    poses, all are left as they are, as an activation stays below 1.

    Of ``[B, I, K]`` and ``[B, types, dim, H, W]``: axis 2 is that of a capsule's numbers.
    """

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not module.training:
            return None
        poses = output.poses if isinstance(output, Capsules) else output
        kept = torch.rand([*poses.shape[:2], *poses.shape[3:]], device=poses.device) >= self.p
        if isinstance(output, Capsules):
            return Capsules(poses * kept.unsqueeze(2), output.activations * kept)
        return poses * (kept.unsqueeze(2).to(poses.dtype) / (1 - self.p))


class DropInputs:
    """Dropout of what a layer gets: single numbers of a linear layer, whole feature maps of a convolution, as a map's
    neighbours say the same (Tompson et al. 2015)."""

    def __init__(self, p: float) -> None:
        self.p = p

    def __call__(self, module: nn.Module, args: Any) -> Any:
        drop = F.dropout if isinstance(module, nn.Linear) else F.dropout2d
        return drop(args[0], self.p, module.training), *args[1:]


def drop_capsules(model: nn.Module, p: float) -> None:
    """Raises ValueError where a network has no primary capsules."""
    primary = getattr(model, "primary", None)
    # Feature maps that a network cuts into capsules later are none.
    if not isinstance(primary, nn.Module) or isinstance(primary, LAYERS):
        raise ValueError(
            f"capsfast.train.Learner: caps_dropout needs primary capsules, {type(model).__name__} has none"
        )
    primary.register_forward_hook(DropCapsules(p))


def drop_hidden(model: nn.Module, p: float) -> None:
    """Raises ValueError where a network has no decoder with hidden layers."""
    decoder = getattr(model, "decoder", None)
    layers = [each for each in decoder.modules() if isinstance(each, LAYERS)] if decoder is not None else []
    if len(layers) < 2:
        raise ValueError("capsfast.train.Learner: decoder_dropout needs a decoder with hidden layers, there is none")
    for layer in layers[1:]:
        layer.register_forward_pre_hook(DropInputs(p))
