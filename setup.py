"""Builds ``capsfast._C``. Metadata is in pyproject.toml.

CAPSFAST_BUILD=0 installs without the extension (the reference backend remains). Otherwise a missing
compiler is an error that names the way out.
"""

import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
# One binary for every torch from here on: the LibTorch stable ABI.
TORCH_TARGET = "2.10"
TORCH_TARGET_VERSION = "0x020a000000000000"


def compiler() -> str | None:
    words = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
    for candidate in (words[0], "c++", "g++", "clang++"):
        if shutil.which(candidate):
            return candidate
    return None


def version() -> str:
    scope: dict[str, str] = {}
    exec((ROOT / "capsfast" / "_version.py").read_text(), scope)
    return scope["__version__"]


def extension():
    import pybind11
    import torch
    from torch.utils.cpp_extension import CppExtension

    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
    headers = [path for suffix in ("*.h", "*.inl") for path in (ROOT / "csrc").rglob(suffix)]
    return CppExtension(
        "capsfast._C",
        sources,
        # pip's pybind11 goes first: torch ships an older one.
        include_dirs=[pybind11.get_include()],
        depends=[str(path.relative_to(ROOT)) for path in headers],
        define_macros=[
            ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
            ("CAPSFAST_TORCH_TARGET", f'"{TORCH_TARGET}"'),
            ("CAPSFAST_BUILD_TORCH", f'"{torch.__version__}"'),
            ("CAPSFAST_VERSION", f'"{version()}"'),
        ],
        extra_compile_args=[
            "-O3",
            "-std=c++17",
            "-fvisibility=hidden",
            "-g0",
            # Checks put __FILE__ into their messages: keep the builder's folders out of the binary.
            f"-fmacro-prefix-map={ROOT.resolve()}/=",
            f"-fmacro-prefix-map={Path(torch.__file__).parent}/=",
            "-Wno-psabi",
        ],
    )


def build():
    if os.environ.get("CAPSFAST_BUILD", "1") == "0":
        return {}
    if compiler() is None:
        raise SystemExit(
            "capsfast: no C++ compiler found. Install one (Debian: apt-get install g++), or install without "
            "the compiled kernels: CAPSFAST_BUILD=0 pip install --no-build-isolation ."
        )
    try:
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        raise SystemExit(
            f"capsfast: building needs torch >= {TORCH_TARGET} in this environment ({error}). "
            "Run: pip install torch ninja pybind11, then pip install --no-build-isolation ."
        ) from error

    class Build(BuildExtension):
        def build_extensions(self):
            for ext in self.extensions:
                # The stable ABI does without torch's Python and C++ libraries.
                ext.libraries = [name for name in ext.libraries if name not in ("torch_python", "c10")]
            super().build_extensions()

    return {"ext_modules": [extension()], "cmdclass": {"build_ext": Build}}


setup(**build())
