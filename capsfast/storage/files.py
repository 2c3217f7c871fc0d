"""Files that exist complete or not at all, even if the process that writes is killed. Errors of unreadable files."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reading(op: str, path: object, what: str, remedy: str, *, quoted: bool = True) -> Iterator[None]:
    """Whatever a reader raises in the block becomes one sentence. The error of most readers depends on the bytes.

    Args:
        op: begins the message, such as ``"capsfast.data.load"``.
        path: the file.
        what: what the file should be, such as ``"a picture"``.
        remedy: ends the message.
        quoted: whether the message has the first line of the reader's error.

    Raises:
        OSError: the system's own, if the file is missing, forbidden or a folder.
        ValueError: any other error.
    """
    try:
        yield
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        said = f" ({lines[0]})" if quoted else ""
    else:
        return
    # Libraries report such a file with an error of their own.
    with open(str(path), "rb"):
        pass
    raise ValueError(f"{op}: {path} can't be read as {what}{said}; {remedy}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields the name of a draft beside ``path``; after the block the draft replaces ``path``.

    If the block raises, the draft is removed and ``path`` is left unchanged. A killed process leaves the draft,
    ``.stem.part.suffix``, and the next process overwrites it. Makes the folder.

    Raises:
        OSError: the folder can't be made or written to, or the device is full.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The suffix stays last, because libraries choose the format of a picture by it.
    draft = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        yield draft
        # Without fsync a crash of the system could leave an empty file under the new name.
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException as error:
        draft.unlink(missing_ok=True)
        # An OSError without errno shows its text only while it has no filename.
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(draft)):
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes ``text`` to ``path``, as :func:`replacing` does."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def check_writable(folder: Path) -> None:
    """Raises now the error that writing into the folder would raise after hours of work. Makes the folder.

    Raises:
        OSError: the folder can't be made or written to, or the device is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()
            # Some devices report that they are full only at fsync.
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = str(folder)
        raise


def check_replaceable(path: Path) -> None:
    """Raises now the error that :func:`replacing` would raise later. ``path`` is left unchanged.

    Raises:
        OSError: as :func:`check_writable`, or ``path`` is not an ordinary file.
    """
    check_writable(path.parent)
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
