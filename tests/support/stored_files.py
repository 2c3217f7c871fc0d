"""Small files in the formats of SmallNORB and CIFAR-10."""

import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsfast.data.cifar import BATCHES
from capsfast.data.norb import norb_files

NORB_MAGIC = {torch.uint8: b"\x55\x4c\x3d\x1e", torch.int32: b"\x54\x4c\x3d\x1e"}


def norb_bytes(values: Tensor) -> bytes:
    sizes = [*values.shape, *[1] * (3 - values.dim())]
    head = NORB_MAGIC[values.dtype] + values.dim().to_bytes(4, "little")
    return head + b"".join(size.to_bytes(4, "little") for size in sizes) + values.numpy().tobytes()


def write_smallnorb(folder: Path, end: str = "", size: int = 8) -> dict[str, Tensor]:
    """20 stereo pairs to train on, 10 to test on, 5 classes; each file by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for part, count in (("train", 20), ("test", 10)):
        images, classes, info = norb_files(part)
        written[images] = torch.randint(0, 256, (count, 2, size, size), dtype=torch.uint8)
        written[classes] = torch.arange(count, dtype=torch.int32) % 5
        written[info] = torch.randint(0, 18, (count, 4), dtype=torch.int32)
    for name, values in written.items():
        content = norb_bytes(values)
        (folder / f"{name}{end}").write_bytes(gzip.compress(content) if end else content)
    return written


class Python2Pickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings: CIFAR-10 was pickled by it."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012

    def save_string(self, value: bytes) -> None:
        self.write(pickle.BINSTRING + len(value).to_bytes(4, "little") + value)
        self.memoize(value)

    dispatch[bytes] = save_string


def python2_pickle(value: Any) -> bytes:
    stream = io.BytesIO()
    Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue()


def cifar_batch(count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (count, 3072), dtype=torch.uint8), torch.arange(count) % 10


def write_cifar(folder: Path, end: str = ".bin", count: int = 12) -> dict[str, tuple[Tensor, Tensor]]:
    """Six batches, binary or (with an empty end) pickled by Python 2's rules."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {name: cifar_batch(count) for names in BATCHES.values() for name in names}
    for name, (images, labels) in written.items():
        if end:
            content = torch.cat([labels.byte()[:, None], images], 1).numpy().tobytes()
        else:
            content = python2_pickle({b"batch_label": b"x", b"labels": labels.tolist(), b"data": images.numpy()})
        (folder / f"{name}{end}").write_bytes(content)
    return written
