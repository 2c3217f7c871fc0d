"""Small files in the formats of data sets: SmallNORB, CIFAR-10, SVHN, and folders of pictures."""

import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

NORB_MAGIC = {torch.uint8: b"\x55\x4c\x3d\x1e", torch.int32: b"\x54\x4c\x3d\x1e"}
NORB_STEMS = ("smallnorb-5x46789x9x18x6x2x96x96-training", "smallnorb-5x01235x9x18x6x2x96x96-testing")


def norb_bytes(values: Tensor) -> bytes:
    sizes = [*values.shape, *[1] * (3 - values.dim())]
    head = NORB_MAGIC[values.dtype] + values.dim().to_bytes(4, "little")
    return head + b"".join(size.to_bytes(4, "little") for size in sizes) + values.numpy().tobytes()


def write_smallnorb(folder: Path, end: str = "", size: int = 8) -> dict[str, Tensor]:
    """Writes 20 stereo pairs for training, 10 for tests, of 5 classes. Returns the content of each file by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for stem, count in zip(NORB_STEMS, (20, 10), strict=True):
        written[f"{stem}-dat.mat"] = torch.randint(0, 256, (count, 2, size, size), dtype=torch.uint8)
        written[f"{stem}-cat.mat"] = torch.arange(count, dtype=torch.int32) % 5
    for name, values in written.items():
        content = norb_bytes(values)
        (folder / f"{name}{end}").write_bytes(gzip.compress(content) if end else content)
    return written


def write_cifar(folder: Path, patch: pytest.MonkeyPatch, count: int = 12) -> Tensor:
    """Writes six batches and the names of classes; torchvision then accepts their md5. Returns the test images."""
    from torchvision.datasets import CIFAR10

    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch", "batches.meta"]
    md5, written = {}, {}
    for name in names:
        images = written[name] = torch.randint(0, 256, (count, 3072), dtype=torch.uint8)
        content = {"data": images.numpy(), "labels": list(range(count)), "label_names": list("abcdefghijkl")}
        (folder / name).write_bytes(pickle.dumps(content))
        md5[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    patch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name in names[:5]])
    patch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    patch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    return written["test_batch"].view(count, 3, 32, 32)


def write_svhn(folder: Path, patch: pytest.MonkeyPatch, count: int = 12) -> None:
    """Writes two files with the classes 1 to 10, which torchvision reads as 0 to 9."""
    from scipy.io import savemat
    from torchvision.datasets import SVHN

    folder.mkdir(parents=True, exist_ok=True)
    known = {}
    for part in ("train", "test"):
        file = folder / f"{part}_32x32.mat"
        images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, count), dtype=np.uint8)
        savemat(file, {"X": images, "y": np.arange(count)[:, None] % 10 + 1})
        known[part] = ["", file.name, hashlib.md5(file.read_bytes()).hexdigest()]
    patch.setattr(SVHN, "split_list", known)


def write_pictures(folder: Path, *, count: int = 10, size: tuple[int, int] = (9, 9), mode: str = "L") -> None:
    """``count`` PNG files for each of the classes cat and dog; the first pixel of the n-th is 10 n."""
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for n in range(count):
            Image.new(mode, size, 10 * n if mode == "L" else (10 * n, 5, 5)).save(folder / name / f"{n:02}.png")
