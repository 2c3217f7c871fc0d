"""capsfast.storage.files: a file exists whole or not at all."""

import resource
from pathlib import Path

import pytest

from capsfast.storage.files import check_replaceable, check_writable, replacing, write_text


def test_folders_are_made_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.json"
    for text in ("one", "two, longer"):
        write_text(path, text)
        check_replaceable(path)
        assert path.read_text() == text and [each.name for each in path.parent.iterdir()] == ["b.json"]
    check_replaceable(tmp_path / "deep" / "record.json")
    assert list((tmp_path / "deep").iterdir()) == []


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
    assert [path.name for path in tmp_path.iterdir()] == ["record.png"]


@pytest.mark.parametrize("name", [None, ".record.part.png", "another.png"])
def test_errors_name_the_file_and_not_its_draft(tmp_path: Path, name: str | None) -> None:
    """Not every writer names the file."""
    given = None if name is None else str(tmp_path / name)
    with pytest.raises(OSError, match="full") as found, replacing(tmp_path / "record.png"):
        raise OSError(28, "full", given)
    assert found.value.filename == str(tmp_path / (name if name == "another.png" else "record.png"))


def test_a_folder_is_tried_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        check_writable(tmp_path / "file")
    with pytest.raises(NotADirectoryError) as found:
        check_writable(tmp_path / "file" / "c")
    assert found.value.filename == str(tmp_path / "file" / "c")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no byte can be written, as on a full disk
    try:
        with pytest.raises(OSError, match="too large") as found_full:
            check_writable(tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert found_full.value.filename == str(tmp_path / "a")


def test_a_device_that_is_full_when_it_is_asked_to_keep_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("capsfast.storage.files.os.fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        check_replaceable(tmp_path / "record.json")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_no_folder_no_device_and_nothing_below_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, Path("/dev/null"), tmp_path / "file" / "record.json"):
        with pytest.raises(OSError, match=r"exists|directory"):
            check_replaceable(path)
    assert Path("/dev/null").is_char_device()
