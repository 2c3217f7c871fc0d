"""Compiles the emulated kernels, once for each state of the sources."""

import fcntl
import functools
import hashlib
import os
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
RUNTIME = ("block.cpp", "team.cpp")
# No fast mathematics, like the CUDA build.
FLAGS = ("-O2", "-g0", "-fPIC", "-std=c++17", "-fvisibility=hidden", "-DCAPSFAST_EMULATED", "-Wno-psabi")
TORCH_FLAGS = ("-DTORCH_TARGET_VERSION=0x020a000000000000",)


def compiler() -> str:
    return (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]


def _state(name: str) -> str:
    """A hash of the sources, the flags and the compiler, without torch: the stable ABI is that of every torch."""
    digest = hashlib.sha256()
    sources = [path for folder in (ROOT / "csrc", HERE) for path in sorted(folder.rglob("*")) if path.suffix != ".py"]
    for path in sources:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    digest.update(repr((name, FLAGS, TORCH_FLAGS, compiler())).encode())
    return digest.hexdigest()[:16]


def _compile(source: Path, target: Path, flags: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [compiler(), *flags, "-x", "c++", "-c", str(source), "-o", str(target)], capture_output=True, text=True
    )
    if ran.returncode != 0:
        raise RuntimeError(f"{source.name} does not compile for the emulator:\n{ran.stderr[-4000:]}")


@functools.cache
def library(name: str) -> Path:
    """The shared object ``name``: "ops", the routing ops, or "planted", kernels with faults in them."""
    with_torch = name == "ops"
    flags, link = FLAGS, ()
    sources = [HERE / part for part in RUNTIME] + sorted(HERE.glob(f"{name}*.cpp"))
    if with_torch:
        torch_home = Path(torch.__file__).parent
        flags = (*FLAGS, *TORCH_FLAGS, f"-I{torch_home / 'include'}")
        link = (f"-L{torch_home / 'lib'}", "-ltorch_cpu", "-ltorch")
        sources += [HERE / "context_host.cpp", *sorted((ROOT / "csrc" / "ops" / "cuda").rglob("*.cu"))]
    flags = (*flags, f"-I{HERE}")
    folder = ROOT / "build" / "emulator" / _state(name)
    found = folder / f"{name}.so"
    folder.mkdir(parents=True, exist_ok=True)
    # Several pytest processes may need it at once.
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found.exists():
            return found
        objects = [folder / ("_".join(path.relative_to(ROOT).parts) + ".o") for path in sources]
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
            list(pool.map(_compile, sources, objects, [flags] * len(sources)))
        partial = folder / f"{name}.partial"
        subprocess.run([compiler(), "-shared", *map(str, objects), "-o", str(partial), *link], check=True)
        partial.rename(found)
        for path in objects:
            path.unlink()
    return found
