"""Building: toolkits and architectures that setup.py finds, what archives hold, messages when something is wrong."""

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from capsfast.environment import native

from ..support.packages import built, copied_checkout

ROOT = Path(__file__).parents[2]


class Configured(NamedTuple):
    said: str
    error: str  # "" if it would compile


@pytest.fixture
def configure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., Configured]:
    """Runs setup.py up to the point where it would compile, on a machine with these GPUs."""

    def run(folder: Path = ROOT, gpus: str = "", **environment: str) -> Configured:
        monkeypatch.chdir(folder)
        for name in ("CAPSFAST_CUDA", "CAPSFAST_BUILD", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "gpus").mkdir(exist_ok=True)
        write_program(tmp_path / "gpus" / "nvidia-smi", f'#!/bin/sh\nprintf "%s\\n" {gpus}\n')
        monkeypatch.setenv("PATH", f"{tmp_path / 'gpus'}{os.pathsep}{os.environ['PATH']}")
        # build() changes this variable; monkeypatch restores it.
        monkeypatch.setenv("MAX_JOBS", "1")
        monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        error = ""
        try:
            runpy.run_path(str(folder / "setup.py"))["build"]()
        except SystemExit as end:
            error = str(end)
        return Configured(capsys.readouterr().out, error)

    return run


Configure = Callable[..., Configured]


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A toolkit whose compiler reports 12.4 and architectures up to 9.0."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda_runtime.h").touch()
    script = """#!/bin/sh
case "$1" in
  --version) echo "Cuda compilation tools, release 12.4, V12.4.99" ;;
  --list-gpu-arch) printf "compute_%s\\n" 50 75 80 86 89 90 ;;
  --dryrun) echo "#$ TOP=TOOLKIT" ;;
esac
"""
    write_program(home / "bin" / "nvcc", script.replace("TOOLKIT", str(home)))
    return home


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# What is asked for, GPUs, environment, and what setup.py says; an error ends the build.
ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
SAID: list[tuple[str, dict[str, str], str]] = [
    ("8.9 8.9", {}, "CUDA 12.4 in TOOLKIT, for 8.9\n"),
    ("12.0", {}, "for 8.0 9.0+PTX"),  # this toolkit does not know the GPU
    ("", {"CAPSFAST_CUDA": "1"}, "for 8.0 9.0+PTX"),
    ("", {ARCHITECTURES: "all"}, "for 7.5 8.0 9.0+PTX"),
    *(("8.9", {ARCHITECTURES: asked}, "for 8.0 9.0+PTX") for asked in ("8.0;9.0+PTX", "8.0, 9.0+PTX")),
    # A laptop with a toolkit and a CUDA torch must not spend minutes to compile kernels that it cannot run.
    *((gpus, {}, "without CUDA kernels: no GPU here that runs them (CAPSFAST_CUDA=1 compiles") for gpus in ("", "7.0")),
    ("7.0", {ARCHITECTURES: "9.0"}, "for 9.0\n"),
    ("8.0", {"CAPSFAST_CUDA": "0"}, ""),
    ("8.0", {"CUDA_HOME": "/nowhere"}, "building without CUDA kernels: no CUDA toolkit with bin/nvcc and include/"),
]
SERVED = "serve (7.5, 8.0, 8.6, 8.9, 9.0), each perhaps with +PTX, got"
NO_TOOLKIT = (
    "CAPSFAST_CUDA=1, but no CUDA toolkit with bin/nvcc and include/cuda_runtime.h in /nowhere (CUDA_HOME names"
)
WRONG: list[tuple[dict[str, str], str]] = [
    *(({ARCHITECTURES: f"8.0 {wrong}"}, f"{SERVED} '{wrong}'") for wrong in ("Hopper", "10.0", "5.0")),
    ({"CAPSFAST_CUDA": "yes"}, "CAPSFAST_CUDA must be 0, 1 or auto, got 'yes'"),
    ({"CUDA_HOME": "/nowhere", "CAPSFAST_CUDA": "1"}, NO_TOOLKIT),
]


@pytest.mark.parametrize(("gpus", "environment", "said"), SAID, ids=str)
def test_what_it_is_compiled_for(
    configure: Configure, toolkit: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, environment: Any, said: str
) -> None:
    for cuda_of_torch in (None, "12.4"):
        monkeypatch.setattr("torch.version.cuda", cuda_of_torch)
        ran = configure(gpus=gpus, **{"CUDA_HOME": str(toolkit), **environment})
        assert not ran.error and said.replace("TOOLKIT", str(toolkit)) in ran.said
        assert ("capsfast: CUDA" in ran.said) == ("for " in said and "without" not in said)


def test_what_cannot_be_built_is_an_error(configure: Configure, toolkit: Path) -> None:
    for environment, message in WRONG:
        assert message in configure(**{"CUDA_HOME": str(toolkit), **environment}).error


def test_a_wrapper_script_is_followed_to_the_toolkit_and_an_old_one_is_named(
    configure: Configure, toolkit: Path, tmp_path: Path
) -> None:
    folder, nvcc = tmp_path / "wrapper", toolkit / "bin" / "nvcc"
    folder.mkdir()
    write_program(folder / "nvcc", f'#!/bin/sh\nexec "{nvcc}" "$@"\n')
    ran = configure(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}", CAPSFAST_CUDA="1")
    assert f"CUDA 12.4 in {toolkit}, for" in ran.said
    nvcc.write_text(nvcc.read_text().replace("12.4", "11.2"))
    ran = configure(CUDA_HOME=str(toolkit), CAPSFAST_CUDA="1")
    assert f"CAPSFAST_CUDA=1, but the CUDA toolkit in {toolkit} is 11.2, the kernels need 12.0" in ran.error
    ran = configure(gpus="8.0", CUDA_HOME=str(toolkit))
    assert not ran.error and "building without CUDA kernels: the CUDA toolkit" in ran.said


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied_checkout(tmp_path_factory.mktemp("checkout"))


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_source_archive_holds_all_that_a_build_needs(
    checkout: Path, toolkit: Path, tmp_path: Path, configure: Configure
) -> None:
    wanted = {name for name in files_in(checkout) if name.startswith(("capsfast/", "csrc/"))}
    # On a machine that would leave the CUDA kernels out.
    archive = built(checkout, "sdist", CAPSFAST_CUDA="0")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    folder = tmp_path / archive.name.removesuffix(".tar.gz")
    there = files_in(folder)
    assert wanted | {"setup.py", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= there
    assert not [name for name in there if name.startswith(("tests/", "docs/", "out/"))]
    # A wheel of the archive has all files of the package, and setup.py of the archive finds its sources.
    with zipfile.ZipFile(built(folder, "wheel", CAPSFAST_BUILD="0")) as wheel:
        assert {name for name in wanted if name.startswith("capsfast/")} <= set(wheel.namelist())
    ran = configure(folder, CUDA_HOME=str(toolkit), CAPSFAST_CUDA="1")
    assert not ran.error and "CUDA 12.4" in ran.said
    (folder / "csrc" / "ops" / "cuda" / "copy.cu").touch()
    wrong = "capsfast: csrc/ must hold what SOURCES in setup.py lists, got: csrc/ops/cuda/copy.cu is not listed"
    assert configure(folder, CUDA_HOME=str(toolkit)).error == f"{wrong}; get a complete copy"
    (folder / "csrc" / "ops" / "cuda" / "pass.cu").unlink()
    for wish in ("0", "1"):
        found = configure(folder, CUDA_HOME=str(toolkit), CAPSFAST_CUDA=wish).error
        assert found == f"{wrong}, csrc/ops/cuda/pass.cu has no file; get a complete copy"


def test_a_build_without_torch_says_how_to_build(checkout: Path) -> None:
    """pip asks what a build requires, then for metadata, in an environment of its own."""
    code = """
import sys
sys.modules["torch"] = None
from setuptools import build_meta
assert build_meta.get_requires_for_build_wheel() == build_meta.get_requires_for_build_sdist() == []
print("no torch needed", flush=True)
build_meta.prepare_metadata_for_build_wheel(".")
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    assert ran.returncode == 1 and "no torch needed" in ran.stdout
    assert (
        "pip's isolated one has none. Run: pip install torch ninja pybind11, then install again with --no" in ran.stderr
    )


PROJECT = """
import runpy
from pathlib import Path
from setuptools import setup, Extension

module = runpy.run_path({setup!r}, run_name="functions")
build = module["build"]
made = dict(build())
made["ext_modules"][0].sources = ["csrc/good.cpp", "csrc/other.cpp"]
made["ext_modules"][0].depends = ["csrc/good.cpp"]
build.__globals__["ROOT"] = Path({root!r})
setup(name="small", packages=["capsfast"], **made)
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A package of two own files, which setup.py builds."""
    (tmp_path / "csrc").mkdir()
    (tmp_path / "capsfast").mkdir()
    (tmp_path / "capsfast" / "__init__.py").touch()
    (tmp_path / "csrc" / "good.cpp").write_text("int good() { return 1; }\n")
    (tmp_path / "csrc" / "other.cpp").write_text("int other() { return 2; }\n")
    (tmp_path / "run.py").write_text(PROJECT.format(setup=str(ROOT / "setup.py"), root=str(tmp_path)))
    return tmp_path


def built_here(small: Path, **environment: str) -> tuple[int, str]:
    """The exit status and what is said."""
    environment = {"CAPSFAST_CUDA": "0", "MAX_JOBS": "2", "CAPSFAST_BUILD": "1", **environment}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120}
    command = [sys.executable, "run.py", "-q", "build_ext", "--inplace"]
    ran = subprocess.run(command, cwd=small, env=os.environ | environment, **pipes)
    return ran.returncode, ran.stdout


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no compiler")
def test_what_a_build_says_and_that_a_broken_one_keeps_the_old_file(small: Path) -> None:
    status, said = built_here(small)
    assert status == 0 and "capsfast: compiling what has changed of 2 files\n" in said, said
    # make shortens these lines.
    brief = re.findall(r"^BRIEF := .*,(sed .*)\)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0]
    short = subprocess.run(brief, shell=True, input=said, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^\[1/2\] csrc/(good|other)\.cpp\n\[2/2\] csrc/(good|other)\.cpp$", short, re.MULTILINE)
    (library,) = (small / "capsfast").glob("_C*.so")
    before = library.read_bytes()
    (small / "csrc" / "other.cpp").write_text("int other() { return 2 }\n")
    status, said = built_here(small)
    assert status == 1 and "expected" in said and library.read_bytes() == before
    assert said.endswith("capsfast: the build failed: Error compiling objects for extension\n")
    _, said = built_here(small, CXX="c++ -DOTHER")
    assert said.endswith("capsfast: CXX must be a program, got 'c++ -DOTHER'; flags go into CFLAGS\n")


def printed(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
def test_the_extension_keeps_to_the_stable_abi() -> None:
    """It loads into every torch from 2.10 on: uses only plain C functions of torch, and only libtorch."""
    assert native.extension is not None
    library = str(native.extension.__file__)
    names = [line.split()[-1] for line in printed("nm", "-D", "--undefined-only", library)]
    assert any(name.startswith("aoti_torch_") for name in names)
    of_torch = ("c10", "2at", "5torch")
    assert not [name for name in names if name.startswith("_Z") and any(part in name for part in of_torch)]
    needed = [line.split("[")[1] for line in printed("readelf", "-d", library) if "(NEEDED)" in line]
    assert not [name for name in needed if name.startswith(("libtorch_python", "libc10", "libtorch_cuda", "libcuda"))]


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
def test_the_extension_says_what_cuda_kernels_it_holds() -> None:
    import torch

    assert native.extension is not None
    info = native.extension.build_info()
    for op in ("dynamic_routing", "dynamic_routing_backward", "routing_pass", "routing_pass_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"capsfast::{op}", "CUDA") == bool(info["cuda"]), op
    assert bool(info["cuda"]) == bool(info["cuda_architectures"])


def test_which_gpus_a_build_serves() -> None:
    for architectures, capability, served in (
        *(("8.0 9.0", (8, 0), True), ("8.0 9.0", (8, 6), True), ("8.6", (8, 0), False), ("8.0 9.0", (10, 0), False)),
        *(("8.0 9.0+PTX", (12, 0), True), ("9.0+PTX", (8, 9), False)),
    ):
        assert native.serves_gpu(architectures, capability) == served, (architectures, capability)


def test_flags_of_nvcc() -> None:
    flags = runpy.run_path(str(ROOT / "setup.py"))["gencode"](["8.0", "9.0a", "12.0+PTX"])
    pairs = ("80", "sm_80"), ("90a", "sm_90a"), ("120", "sm_120"), ("120", "compute_120")
    assert flags == [f"-gencode=arch=compute_{name},code={code}" for name, code in pairs]
