"""capsfast.bench.ran: which kernels changed since they ran on a GPU."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from capsfast.bench import ran
from capsfast.environment import native

ROOT = Path(__file__).resolve().parent.parent


def test_the_file_belongs_to_a_record() -> None:
    content = ran.last_run()
    surroundings = json.loads((ROOT / "benchmarks" / "results" / content["record"]).read_text())["environment"]
    assert surroundings["commit"]["hash"] == content["commit"] and content["gpu"] == surroundings["machine"]["gpu"]
    for backend, folder in ran.FOLDERS.items():
        files = content["files"][backend]
        assert len(files) > 10 and all(name.startswith(folder) for name in files)


def test_hashes_are_those_of_git() -> None:
    found = ran.kernel_files("triton")
    name = next(iter(found))
    answer = subprocess.run(["git", "hash-object", "--no-filters", name], cwd=ROOT, capture_output=True, text=True)
    assert answer.stdout.strip() == found[name]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with two kernels of each backend, all of which ran."""
    for name in ("capsfast/triton/a.py", "capsfast/triton/b.py", "csrc/cuda/a.h", "csrc/ops/cuda/b.cu"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr(ran, "ROOT", tmp_path)
    monkeypatch.setattr(native, "extension", None)
    monkeypatch.setattr(ran, "FILE", tmp_path / "ran.json")
    content = {"gpu": "NVIDIA H200", "date": "2026-11-27", "commit": "0123456789abcdef"}
    files = {backend: ran.kernel_files(backend) for backend in ran.FOLDERS}
    ran.FILE.write_text(json.dumps({**content, "files": files}))
    return tmp_path


def test_changed_kernels_are_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = "commit 0123456789ab on one NVIDIA H200, 2026-11-27"
    assert [ran.since_the_run(each) for each in ("triton", "cuda")] == [f"ran as they are: {known}"] * 2
    built = {"cuda_sources": ran.cuda_sources(ran.kernel_files("cuda"))}
    (tree / "capsfast/triton/b.py").write_text("other")
    (tree / "capsfast/triton/c.py").write_text("new")
    (tree / "csrc/ops/cuda/b.cu").unlink()
    (tree / "csrc/ops/cpu").mkdir()
    (tree / "csrc/ops/cpu/plan.cpp").write_text("no kernel of a GPU")
    assert ran.since_the_run("triton") == f"not run on a GPU since they changed ({known}): b.py, c.py"
    assert ran.since_the_run("cuda") == f"not run on a GPU since they changed ({known}): ops/cuda/b.cu"
    # An extension without its sources is known by their hash.
    (tree / "csrc/cuda/a.h").unlink()
    assert ran.since_the_run("cuda") == "there are none here"
    monkeypatch.setattr(native, "extension", SimpleNamespace(build_info=lambda: built))
    assert ran.since_the_run("cuda").startswith("ran as they are")
    built["cuda_sources"] = "another"
    assert ran.since_the_run("cuda").startswith("the extension was built from other sources")


def test_a_record_of_changed_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"environment": {"commit": {"hash": "0", "changed": True}}}))
    with pytest.raises(ValueError, match="does not say which sources ran"):
        ran.write(path, "2026-11-27")
