"""capsfast.files: a file is there whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from capsfast.files import probe, replacing, write_text


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


def test_probe_leaves_files_and_folders_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "record.json"
    probe(path)
    assert list(path.parent.iterdir()) == []
    path.write_text("old")
    probe(path)
    assert [each.name for each in path.parent.iterdir()] == ["record.json"] and path.read_text() == "old"


@pytest.mark.parametrize("full", ["open", "fsync"])
def test_probe_finds_a_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    def fail(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*(("capsfast.files.os.fsync", fail) if full == "fsync" else (Path, "open", fail)))
    with pytest.raises(OSError, match="No space left"):
        probe(tmp_path / "record.json")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_probe_takes_no_folder_no_device_and_nothing_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, Path("/dev/null"), tmp_path / "file" / "record.json"):
        with pytest.raises(OSError, match=r"exists|directory"):
            probe(path)
    assert Path("/dev/null").is_char_device()
