"""Which kernels changed since they last ran on a GPU.

``ran_on_gpu.json`` names the newest GPU record, its commit, and git's hash of each source file of the kernels at this
commit. ``python -m capsfast.bench.ran RECORD DATE`` writes the file in a checkout that has the commit. setup.py runs
this file for :func:`cuda_sources`, so the top of the file imports nothing of the package.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FILE = HERE / "ran_on_gpu.json"
FOLDERS = {"triton": "capsfast/triton/", "cuda": "csrc/"}
# The sources of the extension that no CUDA kernel is made of.
OTHERS = ("csrc/library.cpp", "csrc/cpu/", "csrc/ops/cpu/")
Hashes = dict[str, str]


def kernel_files(backend: str) -> Hashes:
    """Git's hash of each source file of a backend's kernels, by path; nothing for ``cuda`` outside a checkout."""
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / FOLDERS[backend]).rglob("*") if path.is_file()}
    kept = {name: files[name].read_bytes() for name in sorted(files) if _is_kernel(name)}
    return {name: hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() for name, content in kept.items()}


def _is_kernel(name: str) -> bool:
    return not name.startswith(OTHERS) and not name.endswith(".pyc")


def cuda_sources(hashes: Hashes) -> str:
    """One hash for all files of the CUDA kernels, which the extension keeps as ``build_info()["cuda_sources"]``."""
    return hashlib.sha1("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def last_run() -> dict[str, Any]:
    """The content of ``ran_on_gpu.json``: record, gpu, date, commit, and under "files" hashes by backend and path."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def since_the_run(backend: str) -> str:
    """A sentence that says which kernels of ``triton`` or ``cuda`` changed since the newest record of a GPU."""
    from ..environment import native

    ran, new = last_run(), kernel_files(backend)
    old: Hashes = ran["files"][backend]
    known = f"commit {ran['commit'][:12]} on one {ran['gpu']}, {ran['date']}"
    built = native.extension.build_info().get("cuda_sources") if native.extension and backend == "cuda" else ""
    if not new and not built:
        return "there are none here"
    if built and built != cuda_sources(new or old):
        return f"the extension was built from other sources; kernels last ran as of {known}"
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)] if new else []
    if not changed:
        return f"ran as they are: {known}"
    short = ", ".join(name.removeprefix(FOLDERS[backend]) for name in changed)
    return f"not run on a GPU since they changed ({known}): {short}"


def write(record: Path, date: str) -> None:
    """Writes ``ran_on_gpu.json`` for a record of a GPU.

    Raises:
        ValueError: the record has no commit, or files had changed since.
    """
    environment = json.loads(record.read_text(encoding="utf-8"))["environment"]
    commit = environment["commit"]
    if not commit or commit["changed"]:
        raise ValueError(f"{record.name} does not say which sources ran: its commit is {commit}")
    files = {}
    for backend, folder in FOLDERS.items():
        command = ["git", "-C", str(ROOT), "ls-tree", "-r", commit["hash"], "--", folder]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        hashes = {line.split("\t")[1]: line.split()[2] for line in lines}
        files[backend] = {name: value for name, value in hashes.items() if _is_kernel(name)}
    content = {"record": record.name, "gpu": environment["machine"]["gpu"], "date": date, "commit": commit["hash"]}
    FILE.write_text(json.dumps({**content, "files": files}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
