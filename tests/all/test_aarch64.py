"""The CPU kernels on AArch64: compiled for it without torch, run by qemu, compared with plain loops in double."""

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = platform.machine() in ("aarch64", "arm64")
PREFIX = "" if NATIVE else "aarch64-linux-gnu-"
EMULATOR = [] if NATIVE else ["qemu-aarch64-static"]
SOURCES = ("csrc/ops/cpu/routing_portable.cpp", "csrc/ops/cpu/plan.cpp", "tests/support/aarch64.cpp")

for tool in (f"{PREFIX}g++", *EMULATOR):
    if shutil.which(tool) is None:
        pytest.skip(
            f"{tool} is not installed (apt-get install g++-aarch64-linux-gnu qemu-user-static)", allow_module_level=True
        )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aarch64")

    def compiled(source: str) -> Path:
        made = folder / Path(source).with_suffix(".o").name
        flags = ["-O3", "-std=c++17", "-Wno-psabi", "-Icsrc"]
        subprocess.run([f"{PREFIX}g++", *flags, "-c", source, "-o", made], cwd=ROOT, check=True)
        return made

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, SOURCES))
    subprocess.run([f"{PREFIX}g++", "-static", *objects, "-o", folder / "run"], check=True)
    return folder / "run"


def test_passes_are_right(program: Path) -> None:
    ran = subprocess.run([*EMULATOR, program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for lanes in ("32 bits, 4", "32 bits, 16", "64 bits, 2", "64 bits, 8"):
        assert ran.stdout.count(f"{lanes} lanes") == 5
