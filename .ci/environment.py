"""Chooses the Python for the Makefile and installs what a target needs.

python .ci/environment.py where [--venv=FOLDER]     prints this Python and the name of its extension file
python .ci/environment.py ready PYTHON WHAT         installs torch and build tools; where WHAT is not torch, the
                                                    package as well, with the extra WHAT if that is not package

Runs on the Python that the Makefile calls PYTHON, with nothing installed. TORCH, a requirement, says which torch.
CONSTRAINTS names a file with the version of each package, "" goes without. V=1 shows what pip says.
"""

# The Python that reads this file may be too old for capsfast.
from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD_TOOLS = ("setuptools>=77", "wheel", "ninja", "pybind11>=2.12")
MINIMUM_PYTHON, MINIMUM_TORCH = (3, 10), (2, 10)
# pip takes the releases that were made for the installed torch.
OF_TORCH = ("torch", "torchvision", "triton")
TORCH, CONSTRAINTS = os.environ.get("TORCH", ""), os.environ.get("CONSTRAINTS", "constraints.txt")
TORCH_VERSION = "import importlib.metadata; print(importlib.metadata.version('torch'))"
EXTENSION_SUFFIX = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"


def in_environment() -> bool:
    """Whether this Python belongs to a virtual environment, or to a conda environment other than base."""
    here = Path(sys.prefix)
    conda = (here / "conda-meta").is_dir() and not (here / "condabin").is_dir()
    return conda or sys.prefix != sys.base_prefix


def where(*words: str) -> None:
    venv = words[0].removeprefix("--venv=") if words else "" if in_environment() else ".venv"
    python = f"{venv}/bin/python" if venv else sys.executable
    # An existing environment may have another Python than sys.executable, which would make a new one.
    print(python, f"capsfast/_C{ask(python, EXTENSION_SUFFIX) or sysconfig.get_config_var('EXT_SUFFIX')}")


def ask(python: str, code: str) -> str:
    """What ``code`` prints under ``python``; "" if the code fails or the Python does not exist."""
    if not Path(python).exists():
        return ""
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return ran.stdout.strip() if ran.returncode == 0 else ""


def tested(but: tuple[str, ...]) -> list[str]:
    """The lines of CONSTRAINTS without the packages in ``but``."""
    lines = (ROOT / CONSTRAINTS).read_text().splitlines() if CONSTRAINTS else []
    return [line for line in lines if line.partition("==")[0] not in but]


def install(python: str, what: list[str], constraints: list[str], **environment: str) -> None:
    file = Path("build", "make", "constraints.txt")
    (ROOT / file).write_text("\n".join(constraints))
    # pip splits the variable at spaces, which a relative path does not have.
    environment["PIP_CONSTRAINT"] = f"{file} {os.environ.get('PIP_CONSTRAINT', '')}".strip()
    quiet = [] if os.environ.get("V", "0") not in ("", "0") else ["--quiet"]
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", *quiet, *what]
    if subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode:
        hint = "; CONSTRAINTS= goes without the versions of constraints.txt" if CONSTRAINTS else ""
        sys.exit(f"capsfast: pip could not install {' '.join(what)}; V=1 shows all it says{hint}")


def make_environment(python: str) -> None:
    """A virtual environment, if this Python does not exist, and pip in it."""
    if not ask(python, "print(1)"):
        folder = Path(python).parent.parent
        print(f"capsfast: making the virtual environment {folder}: some seconds", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if not ask(python, "import pip; print(1)"):
        subprocess.run([python, "-m", "ensurepip"], check=True)


def install_torch(python: str) -> None:
    """Keeps an installed torch that is new enough, unless TORCH asks for another."""
    there = ask(python, TORCH_VERSION)
    if there and not TORCH and tuple(map(int, there.split(".")[:2])) < MINIMUM_TORCH:
        sys.exit(
            f"torch {there} is here, capsfast needs 2.10: VENV=.venv makes an environment of its own, "
            "TORCH=torch==2.13.0 (say) replaces the torch that is here"
        )
    tested_torch = "the torch of constraints.txt" if CONSTRAINTS else "the newest torch"
    what = TORCH or (f"torch {there}, which is here," if there else f"{tested_torch} (a download of 3 GB)")
    print(f"capsfast: installing {what} and build tools: half a minute beside the download", flush=True)
    install(python, [TORCH or "torch>=2.10", *BUILD_TOOLS], tested(OF_TORCH if TORCH or there else ()))


def install_package(python: str, what: str) -> None:
    extra, needs = ("", "") if what == "package" else (f"[{what}]", f" with what {what} needs: half a minute")
    print(f"capsfast: installing the package in place{needs}", flush=True)
    constraints = [*tested(OF_TORCH), f"torch==={ask(python, TORCH_VERSION)}"]
    install(python, ["--no-build-isolation", "--editable", f".{extra}"], constraints, CAPSFAST_BUILD="0")


def stamp_of(python: str) -> Path:
    """The file that records what an environment was given. A recreated environment gets another file."""
    config = Path(python).absolute().parent.parent / "pyvenv.cfg"
    born = config.stat().st_mtime_ns if config.exists() else 0
    return ROOT / "build" / "make" / (hashlib.sha256(f"{config} {born}".encode()).hexdigest()[:16] + ".json")


def ready(python: str, what: str) -> None:
    version = ask(python, "import sys; print(sys.version.split()[0])") or sys.version.split()[0]
    if tuple(map(int, version.split(".")[:2])) < MINIMUM_PYTHON:
        sys.exit(f"capsfast needs Python 3.10 or newer, this is {version} ({python})")
    make_environment(python)
    stamp = stamp_of(python)
    done = json.loads(stamp.read_text()) if stamp.exists() else {}
    if "torch" not in done or TORCH not in ("", done["torch"]):
        install_torch(python)
        done = {"torch": TORCH}
    # Changed dependencies are installed again.
    state = hashlib.sha256("\n".join([(ROOT / "pyproject.toml").read_text(), *tested(())]).encode()).hexdigest()
    if what != "torch" and done.get(what) != state:
        install_package(python, what)
        done[what] = state
    stamp.write_text(json.dumps(done))


if __name__ == "__main__":
    {"where": where, "ready": ready}[sys.argv[1]](*sys.argv[2:])
