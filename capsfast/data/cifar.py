"""CIFAR-10 (Krizhevsky 2009): its binary files, and its pickled ones without running code from them."""

import io
import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .labelled import Labelled
from .stored import Stream, reading, take

SHAPE = (3, 32, 32)
NUMBERS = 3 * 32 * 32
RECORD = 1 + NUMBERS  # a label, then the image, channel by channel
CLASSES = 10
BATCHES = {"train": [f"data_batch_{n}" for n in range(1, 6)], "test": ["test_batch"]}
# More than twice a batch of the real files.
MOST_BYTES = 100_000_000


def read_cifar_binary(path: Path | str) -> Labelled:
    """A file of ``cifar-10-batches-bin``: records of a label and 3072 bytes; a name in .gz is decompressed.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no whole number of records, labels above 9, broken gzip, or more than 100 MB.
    """
    path = Path(path)
    op = f"capsfast.data.read_cifar_binary: {path}"
    with reading(op, path) as stream:
        content = _whole(op, stream)
    if not content or len(content) % RECORD:
        raise ValueError(
            f"{op} must hold records of {RECORD} bytes, got {len(content)} bytes: {len(content) // RECORD} records and "
            f"{len(content) % RECORD} bytes; it is cut short or no such file"
        )
    records = torch.frombuffer(content, dtype=torch.uint8).view(-1, RECORD)
    return _labelled(op, records[:, 1:], records[:, 0].long())


def read_cifar_pickle(path: Path | str) -> Labelled:
    """A file of ``cifar-10-batches-py``, of which only plain values and arrays of bytes are taken.

    Nothing that the file names is imported or called: arrays are rebuilt from their bytes.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not such a pickle, cut short or too long, one that names anything else, or more than 100 MB.
    """
    path = Path(path)
    op = f"capsfast.data.read_cifar_pickle: {path}"
    with reading(op, path) as stream:
        content = io.BytesIO(_whole(op, stream))
    try:
        found = _Plain(content, encoding="bytes").load()
    # What a damaged pickle raises depends on the byte that is damaged.
    except Exception as error:
        raise ValueError(f"{op} can't be read as a batch of CIFAR-10: {_first_line(error)}; fetch it again") from None
    if content.read(1):
        raise ValueError(f"{op} is too long: bytes follow its pickle; fetch it again")
    values = found if isinstance(found, dict) else {}
    data, labels = (values.get(name, values.get(name.encode())) for name in ("data", "labels"))
    if not isinstance(data, _Array) or not isinstance(labels, list):
        raise ValueError(f"{op} must be a dict with an array under data and a list under labels; it is no such batch")
    if not all(type(each) is int and 0 <= each < 256 for each in labels):
        raise ValueError(f"{op} must have labels from 0 to {CLASSES - 1}; it is no such batch")
    if data.shape != (len(labels), NUMBERS) or not labels:
        raise ValueError(
            f"{op} must have an image of {NUMBERS} bytes for each of its {len(labels)} labels, got {list(data.shape)}"
        )
    return _labelled(op, data.tensor(), torch.tensor(labels))


def _whole(op: str, stream: Stream) -> bytearray:
    content = take(stream, MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{op} is too long: a batch has at most {MOST_BYTES} bytes, more follow; fetch it again")
    return content


def _labelled(op: str, images: Tensor, labels: Tensor) -> Labelled:
    if int(labels.max()) >= CLASSES:
        raise ValueError(f"{op} must have labels from 0 to {CLASSES - 1}, got {int(labels.max())}; it is no such file")
    return Labelled(images.reshape(-1, *SHAPE), labels)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


class _Array:
    """In the place of numpy's array: its sizes and bytes."""

    shape: tuple[int, ...] = ()

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Type) or dtype.name not in ("u1", b"u1"):
            raise pickle.UnpicklingError("an array of something else than bytes")
        if fortran or not isinstance(content, bytes) or not all(type(size) is int and size >= 0 for size in shape):
            raise pickle.UnpicklingError("an array that is not stored row by row")
        if prod(shape) != len(content):
            raise pickle.UnpicklingError(f"an array of sizes {list(shape)} with {len(content)} bytes")
        self.shape = tuple(shape)
        self.content = bytearray(content)

    def tensor(self) -> Tensor:
        return torch.frombuffer(self.content, dtype=torch.uint8).view(self.shape)


class _Type:
    """In the place of numpy's dtype."""

    def __init__(self, name: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment, which bytes do not have."""


# What a pickle names and calls. Each load has objects of its own without attributes: whatever a pickle sets on them
# would fail, and could not outlast it.
class _Reconstruct:
    __slots__ = ()

    def __call__(self, *_: Any) -> _Array:
        return _Array()


class _NdArray:
    """Is an argument of _Reconstruct, and never called."""

    __slots__ = ()


class _DType:
    __slots__ = ()

    def __call__(self, name: Any, *_: Any) -> _Type:
        return _Type(name)


class _Encode:
    """Bytes as Python 3 writes them into pickles that Python 2 can read."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any = "latin1") -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("bytes in an unknown encoding")
        return text.encode("latin1")


class _Plain(pickle.Unpickler):
    """Plain values, and arrays as :class:`_Array`."""

    KNOWN = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _Reconstruct,
        ("numpy", "ndarray"): _NdArray,
        ("numpy", "dtype"): _DType,
        ("_codecs", "encode"): _Encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no batch needs")
        return self.KNOWN[module, name]()


READERS = {".bin": read_cifar_binary, "": read_cifar_pickle}
FOLDERS = {".bin": "cifar-10-batches-bin", "": "cifar-10-batches-py"}


def read_cifar10(paths: dict[str, Path], end: str) -> tuple[Labelled, Labelled]:
    """Training and test images from the six files by the names of BATCHES; end: ``".bin"``, or ``""`` for pickled ones.

    Raises:
        ValueError: as the readers; files with different numbers of images.
    """
    parts = {name: READERS[end](path) for name, path in paths.items()}
    counts = {name: len(each.labels) for name, each in parts.items()}
    if len(set(counts.values())) > 1:
        # The real ones have 10 000 each. A file that ends with a record shows it in no other way.
        raise ValueError(
            f"capsfast.data.load: the files in {paths['test_batch'].parent} must have as many images each, got "
            f"{', '.join(f'{name} {count}' for name, count in counts.items())}; fetch the shorter ones again"
        )
    train, test = (
        Labelled(torch.cat([parts[name].images for name in names]), torch.cat([parts[name].labels for name in names]))
        for names in BATCHES.values()
    )
    return train, test
