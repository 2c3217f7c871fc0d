"""Loads the compiled extension ``capsfast._C`` and says why when it can't."""

import importlib.util
import re
import sys
from types import ModuleType

import torch

# The LibTorch stable ABI the extension is built against (TORCH_TARGET_VERSION in setup.py).
MINIMUM_TORCH = (2, 10)


def _torch_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _absent() -> str:
    """Why there is no extension for this interpreter."""
    package = importlib.util.find_spec("capsfast")
    folders = list(package.submodule_search_locations or []) if package else []
    from pathlib import Path

    built = sorted(path.name for folder in folders for path in Path(folder).glob("_C.*.so"))
    running = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
    if built:
        return f"the extension was built for another Python ({', '.join(built)}), this is {running}; reinstall capsfast"
    return (
        "capsfast was installed without its extension (no compiler, or CAPSFAST_BUILD=0); "
        "install a C++17 compiler and run: pip install --no-build-isolation --force-reinstall --no-deps capsfast"
    )


def _load() -> tuple[ModuleType | None, str]:
    if _torch_version() < MINIMUM_TORCH:
        wanted = ".".join(map(str, MINIMUM_TORCH))
        return None, f"the extension needs torch {wanted} or newer, this is torch {torch.__version__}"
    if importlib.util.find_spec("capsfast._C") is None:
        return None, _absent()
    try:
        return importlib.import_module("capsfast._C"), ""
    except ImportError as error:
        return None, f"the extension does not load into torch {torch.__version__}: {error}; rebuild capsfast"


extension, why_absent = _load()
