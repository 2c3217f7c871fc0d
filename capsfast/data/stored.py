"""Files of data sets, plain or .gz, read without trusting what they claim."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

GZIP = b"\x1f\x8b"
CHUNK = 1 << 20
Stream = BinaryIO | gzip.GzipFile


def take(stream: Stream, wanted: int) -> bytearray:
    """Up to ``wanted`` bytes, in chunks: a size that the file only claims is never allocated."""
    content = bytearray()
    while len(content) < wanted:
        chunk = stream.read(min(CHUNK, wanted - len(content)))
        if not chunk:
            break
        content += chunk
    return content


@contextmanager
def reading(op: str, path: Path) -> Iterator[Stream]:
    """The content of a file, decompressed if its name ends in .gz; ``op`` names function and file in errors.

    Raises:
        FileNotFoundError: no such file.
        ValueError: broken gzip data.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield stream
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{op} is not valid gzip data ({error}); fetch it again") from None
    except EOFError:
        raise ValueError(f"{op} is cut short: its gzip data ends early; fetch it again") from None


def check_magic(op: str, magic: bytes) -> None:
    """Raises ValueError where the file is compressed and its name does not say so."""
    if magic[:2] == GZIP:
        raise ValueError(f"{op} holds gzip data without a name in .gz; rename or decompress it")


def check_length(op: str, values: bytearray, wanted: int, sizes: list[int]) -> None:
    """Raises ValueError unless there are as many bytes as the sizes in the file need; read one more to see that."""
    if len(values) < wanted:
        raise ValueError(f"{op} is cut short: sizes {sizes} need {wanted} bytes, got {len(values)}; fetch it again")
    if len(values) > wanted:
        raise ValueError(f"{op} is too long: sizes {sizes} need {wanted} bytes, more follow; fetch it again")
