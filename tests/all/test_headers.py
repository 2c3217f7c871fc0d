"""Every header and .inl file of the CPU kernels includes what it uses, so that it opens alone."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in ("csrc/cpu", "csrc/ops/cpu", "csrc/math")
    for path in sorted((ROOT / folder).glob("*"))
    if path.suffix in (".h", ".inl")
]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_files_open_alone() -> None:
    flags = ["-std=c++17", "-fsyntax-only", "-x", "c++", "-w", "-DTORCH_TARGET_VERSION=0x020a000000000000"]

    def errors(path: Path) -> str:
        command = ["g++", *flags, *(f"-I{folder}" for folder in include_paths()), str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert len(FILES) > 40
    with ThreadPoolExecutor(2) as pool:
        assert "".join(pool.map(errors, FILES)) == ""
