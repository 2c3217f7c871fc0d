"""IDX files for tests."""

import gzip
from pathlib import Path

import torch
from torch import Tensor

STEMS = {"train": 60, "t10k": 20}


def idx_bytes(values: Tensor) -> bytes:
    head = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return head + bytes(values.flatten().tolist())


def write_set(folder: Path, mark: str = "-", end: str = "", size: int = 6) -> dict[str, Tensor]:
    """Writes four IDX files of random images with labels 0 to 3: 60 for training and 20 for tests."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for stem, count in STEMS.items():
        written[f"{stem}-images"] = torch.randint(0, 256, (count, size, size), dtype=torch.uint8)
        written[f"{stem}-labels"] = torch.arange(count, dtype=torch.uint8) % 4
    for name, values in written.items():
        content = idx_bytes(values)
        path = folder / f"{name}{mark}idx{values.dim()}-ubyte{end}"
        path.write_bytes(gzip.compress(content) if end else content)
    return written
