"""A network that trains in a second and uses every source of random numbers, and a comparison of checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capsfast import train
from capsfast.train import ImageData, Learner
from capsfast.train.checkpoint import read_checkpoint

TINY: dict[str, Any] = {"conv_channels": 6, "primary_groups": 2, "primary_dim": 4, "digit_dim": 5}
TINY_DEEP: dict[str, Any] = {"conv_channels": 6, "types": 2, "dims": [2, 3, 3], "digit_dim": 5}


def margin(lengths: Tensor, present: Tensor) -> Tensor:
    """Sabour et al. 2017, eq. 4, for each sample."""
    loss = present * (0.9 - lengths).clamp(min=0) ** 2 + 0.5 * (1 - present) * (lengths - 0.1).clamp(min=0) ** 2
    return loss.sum(1)


def learner_for(images: ImageData, model: str = "capsnet", **more: Any) -> Learner:
    options = {"capsnet": TINY, "deepcaps": TINY_DEEP}.get(model, {"conv_channels": 6, "primary_groups": 2})
    return Learner(model, **images.sets.sizes, **{"options": options, "lr": 0.01, **more})


def learner_and_images(folder: Path, workers: int = 0, hold_out: float | None = None) -> tuple[Learner, ImageData]:
    """Steps of 8 images; order, shift, flip and dropout are random."""
    images = ImageData(str(folder), batch_size=8, flip=True, hold_out=hold_out, seed=3, workers=workers)
    learner = learner_for(images, decay_steps=3, warmup_steps=4)
    learner.model.conv = nn.Sequential(learner.model.conv, nn.Dropout(0.2))
    return learner, images


def fitted(out: Path, learner: Learner, images: ImageData, resume: Path | None = None, **options: Any) -> Any:
    """Without a log, on the CPU. Returns what fit() returns."""
    common = {"epochs": 1, "accelerator": "cpu", "devices": 1, "progress": False, "logger": False}
    return train.fit(train.make_trainer(out, **common | options), learner, images, resume)


def trained(folder: Path, out: Path, resume: Path | None = None, hold_out: float | None = None, **more: Any) -> Learner:
    """Two epochs of 8 steps unless told otherwise."""
    learner, images = learner_and_images(folder, hold_out=hold_out)
    fitted(out, learner, images, resume, **{"epochs": 2, **more})
    return learner


def tensors(content: Any) -> Iterator[Tensor]:
    if isinstance(content, Tensor):
        yield content
    elif isinstance(content, dict):
        for name in sorted(content, key=str):
            yield from tensors(content[name])
    elif isinstance(content, list | tuple):
        for each in content:
            yield from tensors(each)


def assert_same_state(one: Path, other: Path, steps: int = 16) -> None:
    """Weights, both moments of Adam, and the schedule, bit for bit, after two epochs."""
    a, b = read_checkpoint(one), read_checkpoint(other)
    for part in ("state_dict", "optimizer_states"):
        pairs = list(zip(tensors(a[part]), tensors(b[part]), strict=True))
        assert len(pairs) > 5 and all(torch.equal(x, y) for x, y in pairs)
    assert a["global_step"] == b["global_step"] == steps and a["epoch"] == b["epoch"]
    assert a["lr_schedulers"] == b["lr_schedulers"]
