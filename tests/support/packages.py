"""What setuptools builds of this checkout, in a copy of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def copied_checkout(folder: Path) -> Path:
    """Copies the sources that git knows or would take: a build writes beside them."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if (ROOT / name).is_file() and (name.startswith(("capsfast/", "csrc/")) or "/" not in name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def built(folder: Path, what: str, **environment: str) -> Path:
    """What setuptools, called as pip calls it, builds in a Python without torch."""
    code = f"import sys; sys.modules['torch'] = None; from setuptools import build_meta; build_meta.build_{what}('out')"
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return max((folder / "out").iterdir(), key=lambda path: path.stat().st_mtime_ns)
