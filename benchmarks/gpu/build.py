"""A step: the extension in place, for the GPU of this machine alone, without an index to install from."""

import os
import runpy
import sys
import types
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import setuptools.dist
import torch
from torch.utils.cpp_extension import include_paths

ROOT = Path(__file__).resolve().parents[2]
# The first that reads pyproject.toml as it is.
SETUPTOOLS = 77


def main() -> None:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
        print(f"for compute capability {major}.{minor}", flush=True)
    try:
        version("pybind11")
    except PackageNotFoundError:
        # torch has its headers.
        sys.modules["pybind11"] = types.SimpleNamespace(get_include=lambda: include_paths()[0])  # type: ignore[assignment]
        print("with the pybind11 of torch", flush=True)
    if int(version("setuptools").split(".")[0]) < SETUPTOOLS:
        # A build in place needs nothing from there.
        setuptools.dist.Distribution.parse_config_files = lambda self, *files, **options: None  # type: ignore[method-assign]
        print(f"without pyproject.toml: setuptools is older than {SETUPTOOLS}", flush=True)
    os.chdir(ROOT)
    sys.argv = ["setup.py", "build_ext", "--inplace"]
    runpy.run_path("setup.py", run_name="__main__")


if __name__ == "__main__":
    main()
