"""Files that are there whole or not at all, whatever ends the process that writes them."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives the name of a draft beside ``path``, which takes its place once the block has filled it.

    If the block raises, the draft is removed and ``path`` stays what it was; a process that is killed leaves the
    draft, ``.stem.part.suffix``, which the next one overwrites. Makes the folder.

    Raises:
        OSError: the folder can't be made or written to, or the device is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The ending stays last: libraries choose the format of a picture by it.
    draft = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        yield draft
        # Without it a crash of the system could leave the new name on an empty file.
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        # Without a number the text is all there is, and a name would hide it.
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(draft)):
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` to ``path``, as :func:`replacing` does."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raises at once what writing into the folder after hours of work would raise. Makes the folder.

    Raises:
        OSError: the folder can't be made or written to, or the device is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
            # Some devices find out that they are full when they are asked to keep the byte.
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(folder)
        raise


def check_replaceable(path: Path) -> None:
    """The same for :func:`replacing`; leaves ``path`` as it is.

    Raises:
        OSError: as :func:`check_writable`, or ``path`` is no ordinary file.
    """
    check_writable(path.parent)
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
