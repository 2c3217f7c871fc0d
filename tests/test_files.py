"""capsfast.files: a file is there whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from capsfast.files import replacing, write_text


def test_folders_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    write_text(path, "one")
    write_text(path, "two, longer")
    assert path.read_text() == "two, longer"
    assert [each.name for each in path.parent.iterdir()] == ["b.json"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_what_ends_the_writing_leaves_the_old_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "record.png"
    write_text(path, "old")

    def write() -> None:
        with replacing(path) as draft:
            assert draft.parent == path.parent and draft.suffix == ".png"
            draft.write_text("half of the n")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["record.png"]


def test_a_killed_process_leaves_the_old_file_and_the_next_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_text(path, "old")
    code = f"""
import os, signal
from pathlib import Path
from capsfast.files import replacing
with replacing(Path({str(path)!r})) as draft:
    draft.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["record.json"]
