"""Loads the compiled extension ``capsfast._C``, or gives the reason why it can't."""

import ast
import functools
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import torch

from .._version import __version__
from .install import in_the_checkout
from .names import PACKAGE
from .private_torch import constant_while_tracing

# The LibTorch stable ABI the extension is built against (TORCH_TARGET_VERSION in setup.py).
MINIMUM_TORCH = (2, 10)


def _schemas() -> tuple[str, ...]:
    """The op schemas, which csrc/library.cpp includes too: in both languages a list of strings, once the macros are
    replaced."""
    text = Path(__file__).parents[1].joinpath("ops", "schemas.inc").read_text(encoding="utf-8")
    for macro, name, lines in re.findall(r"(#define (\w+) ((?:\\\n.+?)+)\n)", text):
        text = text.replace(macro, "").replace(name, lines.replace("\\\n", ""))
    return ast.literal_eval(f"({text})")  # type: ignore[no-any-return]


SCHEMAS = _schemas()
_REMEDY = f"build it {in_the_checkout()}"


def _torch_version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _absent() -> str:
    """Why this interpreter finds no extension."""
    package = importlib.util.find_spec(PACKAGE)
    folders = list(package.submodule_search_locations or []) if package else []
    built = sorted(path.name for folder in folders for path in Path(folder).glob("_C.*.so"))
    running = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    if built:
        return f"the extension was built for another Python ({', '.join(built)}), this is {running}; {_REMEDY}"
    return (
        "there is no extension (CAPSFAST_BUILD=0, the wheel for any platform, or a checkout that was not built); "
        f"on Linux install a C++17 compiler and {_REMEDY}"
    )


def _load() -> tuple[ModuleType | None, str]:
    if _torch_version() < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        return None, f"the extension needs torch {wanted} or newer, this is torch {torch.__version__}"
    spec = importlib.util.find_spec(f"{PACKAGE}._C")
    # The import hook of an editable install may offer its own extension for a folder that has none.
    if spec is None or Path(spec.origin or "").parent != Path(__file__).parents[1]:
        return None, _absent()
    try:
        module = importlib.import_module(f"{PACKAGE}._C")
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"the extension does not load into torch {torch.__version__}: {error}; {_REMEDY}"
    built = module.build_info()
    if built["version"] != __version__:
        return None, f"the extension was built from capsfast {built['version']}, this is {__version__}; {_REMEDY}"
    if built.get("schemas") != SCHEMAS:
        return None, f"the extension was built from older or newer sources than these; {_REMEDY}"
    asked = os.environ.get("CAPSFAST_ISA")
    if asked and asked != built["instruction_set"]:
        raise ValueError(
            f"CAPSFAST_ISA: must be one of {', '.join(built['instruction_sets'])}, no wider than this machine's "
            f"{built['instruction_set']}, got {asked!r}"
        )
    return module, ""


extension, why_absent = _load()
_BUILD = {} if extension is None else extension.build_info()


@constant_while_tracing
def why_no_cuda() -> str:
    """Why the CUDA kernels of the extension can't run here, "" if they can."""
    if extension is None:
        return why_absent
    # This reason goes first, because a build can't change it.
    # torch.cuda.is_available() takes longer, because it reads the environment at each call.
    if not torch.cuda.is_initialized() and not torch.cuda.is_available():
        return "there is no CUDA device that this torch can use"
    if not _BUILD.get("cuda"):
        return f"the extension was built without CUDA kernels; install a CUDA toolkit (CUDA_HOME) and {_REMEDY}"
    return ""


def serves_gpu(architectures: str, capability: tuple[int, int]) -> bool:
    """Whether kernels built for ``architectures``, "8.0 9.0+PTX", run on a GPU of this compute capability.

    Machine code runs on GPUs of its major version and its minor version or newer; PTX runs on every newer GPU.
    """
    for name in architectures.split():
        major, minor = map(int, name.removesuffix("+PTX").rstrip("af").split("."))
        if major == capability[0] and minor <= capability[1]:
            return True
        if name.endswith("+PTX") and (major, minor) <= capability:
            return True
    return False


def has_rows(capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability runs kernels compiled for 8.0 or newer, as csrc/ops/cuda/rows/ needs."""
    built = _BUILD["cuda_architectures"].split()
    return serves_gpu(" ".join(name for name in built if not name.startswith("7.")), capability)


@constant_while_tracing
def why_not_on(device: torch.device) -> str:
    """Why the CUDA kernels can't run on this GPU, "" if they can; call it only if ``why_no_cuda()`` is ""."""
    return _why_not_on(device)


@functools.cache
def _why_not_on(device: torch.device) -> str:
    built, capability = _BUILD["cuda_architectures"], torch.cuda.get_device_capability(device)
    if serves_gpu(built, capability):
        return ""
    number = ".".join(map(str, capability))
    return (
        f"the CUDA kernels were built for compute capability {built}, {device} has {number}; "
        f"TORCH_CUDA_ARCH_LIST={number} and {_REMEDY}"
    )
