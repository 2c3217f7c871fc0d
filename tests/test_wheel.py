"""Building: how setup.py finds a toolkit and architectures, and what it says when something is wrong."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from capsfast import native

ROOT = Path(__file__).parent.parent


def configure(**environment: str) -> subprocess.CompletedProcess[str]:
    """setup.py up to the point where it would start to compile."""
    hidden = ("CAPSFAST_CUDA", "CAPSFAST_BUILD", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH")
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, "setup.py", "--name"], capture_output=True, text=True, cwd=ROOT, env=clean | environment
    )


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """A toolkit whose compiler says that it is 12.4 and knows architectures up to 9.0."""
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


def test_the_default_is_every_architecture_the_toolkit_knows_and_ptx_of_the_newest(toolkit: Path) -> None:
    ran = configure(CUDA_HOME=str(toolkit))
    assert ran.returncode == 0, ran.stderr
    assert f"CUDA 12.4 in {toolkit}, for 8.0 8.6 8.9 9.0+PTX" in ran.stdout


def test_a_wrapper_script_is_followed_to_the_toolkit(toolkit: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wrapper" / "bin"
    folder.mkdir(parents=True)
    write_program(folder / "nvcc", f'#!/bin/sh\nexec "{toolkit}/bin/nvcc" "$@"\n')
    ran = configure(PATH=f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert f"CUDA 12.4 in {toolkit}, for" in ran.stdout


@pytest.mark.parametrize("asked", ["8.0;9.0+PTX", "8.0 9.0+PTX", "8.0, 9.0+PTX"])
def test_the_list_of_architectures_is_honoured(toolkit: Path, asked: str) -> None:
    ran = configure(CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST=asked)
    assert "for 8.0 9.0+PTX" in ran.stdout


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("Hopper", "must list compute capabilities such as '8.0 9.0+PTX', got 'Hopper'"),
        ("10.0", "asks for 10.0, which the CUDA toolkit 12.4 in"),
        ("7.5", "need compute capability 8.0 or newer, got 7.5"),
    ],
)
def test_architectures_that_cannot_be_built_are_errors(toolkit: Path, asked: str, message: str) -> None:
    ran = configure(CUDA_HOME=str(toolkit), TORCH_CUDA_ARCH_LIST=asked)
    assert ran.returncode != 0
    assert message in ran.stderr


def test_an_old_toolkit_is_named(toolkit: Path) -> None:
    nvcc = toolkit / "bin" / "nvcc"
    nvcc.write_text(nvcc.read_text().replace("12.4", "11.2"))
    ran = configure(CUDA_HOME=str(toolkit), CAPSFAST_CUDA="1")
    assert ran.returncode != 0
    assert f"CAPSFAST_CUDA=1, but the CUDA toolkit in {toolkit} is 11.2, the kernels need 12.0" in ran.stderr
    ran = configure(CUDA_HOME=str(toolkit))
    assert ran.returncode == 0
    assert "building without CUDA kernels: the CUDA toolkit" in ran.stdout


def test_no_toolkit(tmp_path: Path) -> None:
    missing = f"no CUDA toolkit with bin/nvcc and include/cuda_runtime.h in {tmp_path} (CUDA_HOME names the folder)"
    ran = configure(CUDA_HOME=str(tmp_path), CAPSFAST_CUDA="1")
    assert ran.returncode != 0
    assert f"CAPSFAST_CUDA=1, but {missing}" in ran.stderr
    ran = configure(CUDA_HOME=str(tmp_path))
    assert ran.returncode == 0
    assert f"building without CUDA kernels: {missing}" in ran.stdout


def test_cuda_can_be_left_out(toolkit: Path) -> None:
    ran = configure(CUDA_HOME=str(toolkit), CAPSFAST_CUDA="0")
    assert ran.returncode == 0
    assert "capsfast: CUDA" not in ran.stdout


def test_a_wrong_wish_is_an_error() -> None:
    ran = configure(CAPSFAST_CUDA="yes")
    assert ran.returncode != 0
    assert "CAPSFAST_CUDA must be 0, 1 or auto, got 'yes'" in ran.stderr


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
def test_the_extension_keeps_to_the_stable_abi() -> None:
    """It loads into every torch from 2.10 on: no symbol of torch but plain C functions, no library but libtorch."""
    assert native.extension is not None
    library = str(native.extension.__file__)
    names = [
        line.split()[-1]
        for line in subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    ]
    assert any(name.startswith("aoti_torch_") for name in names)
    mangled = [name for name in names if name.startswith("_Z") and ("c10" in name or "2at" in name or "5torch" in name)]
    assert mangled == []
    needed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    libraries = [line.split("[")[1].rstrip("]") for line in needed.splitlines() if "(NEEDED)" in line]
    assert not [
        name for name in libraries if name.startswith(("libtorch_python", "libc10", "libtorch_cuda", "libcuda"))
    ]


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
def test_the_extension_says_what_cuda_kernels_it_holds() -> None:
    import torch

    assert native.extension is not None
    info = native.extension.build_info()
    for op in ("dynamic_routing", "dynamic_routing_backward", "route_votes", "route_votes_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"capsfast::{op}", "CUDA") == bool(info["cuda"]), op
    assert bool(info["cuda"]) == bool(info["cuda_architectures"])


@pytest.mark.parametrize(
    ("architectures", "capability", "served"),
    [
        ("8.0 9.0", (8, 0), True),
        ("8.0 9.0", (8, 6), True),
        ("8.6", (8, 0), False),
        ("8.0 9.0", (10, 0), False),
        ("8.0 9.0+PTX", (12, 0), True),
        ("9.0+PTX", (8, 9), False),
    ],
)
def test_which_gpus_a_build_serves(architectures: str, capability: tuple[int, int], served: bool) -> None:
    assert native.serves_gpu(architectures, capability) == served
