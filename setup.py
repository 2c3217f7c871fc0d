"""Builds ``capsfast._C``. Metadata is in pyproject.toml.

CAPSFAST_BUILD=0 installs without the extension (the reference backend remains). Otherwise a missing
compiler is an error that names the remedy.

CAPSFAST_CUDA=auto (default) adds the CUDA kernels if there is a toolkit, and either a GPU in this machine or a
TORCH_CUDA_ARCH_LIST that names GPUs ("8.0 9.0+PTX", or "all"). 1 demands the CUDA kernels, 0 leaves them out.
MAX_JOBS is the number of compilers that run at a time.
"""

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

from setuptools import setup

ROOT = Path(__file__).parent
# The LibTorch stable ABI: one binary serves this torch and every newer one.
TORCH_TARGET = "2.10"
TORCH_TARGET_VERSION = "0x020a000000000000"
# Turing to Blackwell. Code for 8.0 also runs on GPUs of 8.6 and 8.9. The newest is also kept as PTX, for later GPUs.
ARCHITECTURES = ("7.5", "8.0", "9.0", "10.0", "12.0")
# For CAPSFAST_CUDA=1 on a machine without a GPU: the GPUs of data centres, and PTX for later GPUs.
WITHOUT_GPU = ("8.0", "9.0")
OLDEST_GPU = (7, 5)
MINIMUM_CUDA = (12, 0)
# Memory that one compiler of CUDA sources takes, for the architectures above.
GIGABYTES_PER_JOB = 1.5
# In csrc/, by name: without one of them a library links all the same, and then does not load.
SOURCES = """
library.cpp cpu/isa.cpp cpu/parallel.cpp plans/driver.cpp plans/plan.cpp plans/serve.cpp
ops/cpu/em_routing.cpp ops/cpu/em_update.cpp ops/cpu/factored.cpp ops/cpu/plan.cpp ops/cpu/routing.cpp
ops/cpu/windows.cpp
ops/cpu/factored_avx2.cpp ops/cpu/factored_avx512.cpp ops/cpu/factored_portable.cpp
ops/cpu/routing_avx2.cpp ops/cpu/routing_avx512.cpp ops/cpu/routing_portable.cpp
ops/cpu/rows_avx2.cpp ops/cpu/rows_avx512.cpp ops/cpu/rows_portable.cpp
ops/cpu/small_batch_avx2.cpp ops/cpu/small_batch_avx512.cpp ops/cpu/small_batch_portable.cpp
cuda/context.cpp ops/cuda/backward.cu ops/cuda/forward.cu ops/cuda/pass.cu
ops/cuda/columns/routing.cu ops/cuda/instantiations/bf16.cu ops/cuda/instantiations/f16.cu
ops/cuda/instantiations/columns_10.cu ops/cuda/instantiations/columns_8.cu ops/cuda/instantiations/f32.cu
ops/cuda/instantiations/f64.cu ops/cuda/instantiations/rows_12_24.cu ops/cuda/instantiations/rows_20.cu
"""


def compiler() -> str | None:
    named = os.environ.get("CXX")
    if named and not shutil.which(named):
        raise SystemExit(f"capsfast: CXX must be a program, got {named!r}; flags go into CFLAGS")
    return next(filter(shutil.which, (named or "c++", "g++", "clang++")), None)


class Toolkit(NamedTuple):
    home: Path
    version: tuple[int, int]
    known: frozenset[str]  # architectures that nvcc knows, such as "9.0"

    @property
    def nvcc(self) -> str:
        return str(self.home / "bin" / "nvcc")


def output_of(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    return ran.stdout + ran.stderr


def toolkit_folders() -> list[Path]:
    """Where a toolkit may be, the best guess first. If the user names a folder, only that folder counts."""
    named = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    if named:
        return named
    found = []
    nvcc = shutil.which("nvcc")
    if nvcc:
        # nvcc may be a script that calls the real nvcc elsewhere; a dry run prints the real folder.
        top = re.search(r"#\$ TOP=(.+)", output_of(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull))
        found += [Path(top[1].strip())] if top else []
        found.append(Path(nvcc).resolve().parent.parent)
    return [*found, Path("/usr/local/cuda")]


def toolkit() -> Toolkit | str:
    """The CUDA toolkit, or why there is none."""
    for folder in toolkit_folders():
        home = folder.resolve()
        if not ((home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists()):
            continue
        nvcc = str(home / "bin" / "nvcc")
        release = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version"))
        if release is None:
            return f"{nvcc} --version does not say which release it is"
        number = (int(release[1]), int(release[2]))
        if number < MINIMUM_CUDA:
            wanted = ".".join(map(str, MINIMUM_CUDA))
            return f"the CUDA toolkit in {home} is {number[0]}.{number[1]}, the kernels need {wanted} or newer"
        known = re.findall(r"compute_(\d+)(\d)\b", output_of(nvcc, "--list-gpu-arch"))
        return Toolkit(home, number, frozenset(f"{major}.{minor}" for major, minor in known))
    tried = ", ".join(dict.fromkeys(map(str, toolkit_folders())))
    return f"no CUDA toolkit with bin/nvcc and include/cuda_runtime.h in {tried} (CUDA_HOME names the folder)"


def gpus() -> list[str]:
    """The compute capabilities, such as "9.0", of the GPUs in this machine that can run the kernels, each once."""
    program = shutil.which("nvidia-smi")
    said = output_of(program, "--query-gpu=compute_cap", "--format=csv,noheader") if program else ""
    found = set(re.findall(r"^\s*(\d+\.\d)\s*$", said, re.MULTILINE))
    return sorted(name for name in found if as_numbers(name) >= OLDEST_GPU)


def asked_architectures() -> str:
    return os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()


def wanted_toolkit() -> Toolkit | None:
    wish = os.environ.get("CAPSFAST_CUDA", "auto")
    if wish not in ("0", "1", "auto"):
        raise SystemExit(f"capsfast: CAPSFAST_CUDA must be 0, 1 or auto, got {wish!r}")
    if wish == "0":
        return None
    if wish == "auto" and not (gpus() or asked_architectures()):
        print("capsfast: without CUDA kernels: no GPU here that runs them (CAPSFAST_CUDA=1 compiles them all the same)")
        return None
    found = toolkit()
    if isinstance(found, str):
        if wish == "1":
            raise SystemExit(f"capsfast: CAPSFAST_CUDA=1, but {found}")
        print(f"capsfast: building without CUDA kernels: {found}")
        return None
    return found


def architectures(found: Toolkit) -> list[str]:
    """TORCH_CUDA_ARCH_LIST, or else this machine's GPUs, or else WITHOUT_GPU. "+PTX" marks what is also kept as PTX."""
    asked = [word for word in re.split(r"[;,\s]+", asked_architectures()) if word]
    if not asked:
        here = [name for name in gpus() if name in found.known]
        return here or [*WITHOUT_GPU[:-1], f"{WITHOUT_GPU[-1]}+PTX"]
    if asked == ["all"]:
        names = [name for name in ARCHITECTURES if name in found.known]
        return [*names[:-1], f"{names[-1]}+PTX"]
    served = sorted((name for name in found.known if as_numbers(name) >= OLDEST_GPU), key=as_numbers)
    for name in asked:
        if re.sub(r"[af]?(\+PTX)?$", "", name) not in served:
            raise SystemExit(
                "capsfast: TORCH_CUDA_ARCH_LIST must be 'all', or list compute capabilities that the kernels and CUDA "
                f"{found.version[0]}.{found.version[1]} in {found.home} serve ({', '.join(served)}), each perhaps with "
                f"+PTX, got {name!r}"
            )
    return asked


def as_numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def gencode(names: list[str]) -> list[str]:
    """nvcc's flags. torch would add its own, but leaves them out if the folder's name holds "arch"."""
    flags = []
    for name in names:
        digits = name.removesuffix("+PTX").replace(".", "")
        kinds = ("sm", "compute") if name.endswith("+PTX") else ("sm",)
        flags += [f"-gencode=arch=compute_{digits},code={kind}_{digits}" for kind in kinds]
    return flags


def jobs() -> int:
    """How many compilers run at a time: as many as cores and memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        free = None
    return cores if free is None else max(1, min(cores, int(int(free[1]) / 2**20 / GIGABYTES_PER_JOB)))


def note_sources() -> None:
    """Writes the hash of the CUDA sources where library.cpp finds the hash. A macro would compile all files again."""
    ran = runpy.run_path(str(ROOT / "capsfast" / "bench" / "ran.py"))
    header = ROOT / "build" / "capsfast_sources.h"
    text = f'#define CAPSFAST_CUDA_SOURCES "{ran["cuda_sources"](ran["kernel_files"]("cuda"))}"\n'
    if not header.exists() or header.read_text() != text:
        header.parent.mkdir(exist_ok=True)
        header.write_text(text)


def sources(cuda: bool) -> list[str]:
    listed = {Path("csrc", name) for name in SOURCES.split()}
    there = {path.relative_to(ROOT) for suffix in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(suffix)}
    if listed != there:
        names = ", ".join(
            sorted(f"{path} {'has no file' if path in listed else 'is not listed'}" for path in listed ^ there)
        )
        raise SystemExit(f"capsfast: csrc/ must hold what SOURCES in setup.py lists, got: {names}; get a complete copy")
    return sorted(str(path) for path in listed if cuda or "cuda" not in path.parts)


def extension(found: Toolkit | None):
    import pybind11
    import torch
    from torch.utils import cpp_extension

    headers = [path for suffix in ("*.h", "*.inl") for path in (ROOT / "csrc").rglob(suffix)]
    headers.append(ROOT / "capsfast" / "ops" / "schemas.inc")
    hidden = [f"{ROOT.resolve()}/=", f"{Path(torch.__file__).parent}/="]
    macros = [
        ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
        ("CAPSFAST_TORCH_TARGET", f'"{TORCH_TARGET}"'),
        ("CAPSFAST_BUILD_TORCH", f'"{torch.__version__}"'),
        ("CAPSFAST_VERSION", f'"{runpy.run_path(str(ROOT / "capsfast" / "_version.py"))["__version__"]}"'),
    ]
    # Checks put __FILE__ into their messages; this keeps the builder's folders out of the binary.
    cxx = ["-O3", "-std=c++17", "-fvisibility=hidden", "-g0", "-Wno-psabi"]
    # The flags of the builder come last, so that CFLAGS="-g -O1" makes an extension for a debugger.
    cxx += [*(f"-fmacro-prefix-map={folder}" for folder in hidden), *shlex.split(os.environ.get("CFLAGS", ""))]
    # The installed pybind11 goes first, because torch ships an older one.
    more = {"include_dirs": [pybind11.get_include()]}
    nvcc = []
    if found:
        note_sources()
        more["include_dirs"].append(str(ROOT / "build"))
        # A CPU-only torch has the headers, but looks for no toolkit.
        cpp_extension.CUDA_HOME = str(found.home)
        names = architectures(found)
        print(f"capsfast: CUDA {found.version[0]}.{found.version[1]} in {found.home}, for {' '.join(names)}")
        macros += [
            ("CAPSFAST_CUDA", "1"),
            ("CAPSFAST_CUDA_VERSION", f'"{found.version[0]}.{found.version[1]}"'),
            ("CAPSFAST_CUDA_ARCHITECTURES", f'"{" ".join(names)}"'),
        ]
        nvcc = ["-O3", "-std=c++17", *gencode(names), "-Xcompiler", "-fvisibility=hidden"]
        # Compresses to a quarter of the size. Drivers from CUDA 12.4 on can unpack this. Toolkits from 13 on need such
        # drivers anyway; an older toolkit may serve older drivers, unless the build is for all GPUs, to be published.
        for_everyone = asked_architectures() == "all" and "compress-mode" in output_of(found.nvcc, "-h")
        if found.version >= (13, 0) or for_everyone:
            nvcc.append("--compress-mode=size")
        nvcc += [word for folder in hidden for word in ("-Xcompiler", f"-fmacro-prefix-map={folder}")]
        machine = {"aarch64": "sbsa-linux"}.get(platform.machine(), "x86_64-linux")
        folders = [found.home / "lib64", found.home / "targets" / machine / "lib"]
        more["include_dirs"].append(str(found.home / "include"))
        more["library_dirs"] = [str(folder) for folder in folders if folder.is_dir()]
        # Links cudart statically, because the process may hold torch's runtime too. CUDA's stream comes from libtorch
        # by a weak symbol, for which a linker alone would not keep the library.
        more["libraries"] = ["cudart_static", "rt", "dl", "pthread"]
        more["extra_link_args"] = ["-Wl,--no-as-needed", "-ltorch"]
    return cpp_extension.CppExtension(
        "capsfast._C",
        sources(cuda=found is not None),
        depends=[str(path.relative_to(ROOT)) for path in headers],
        define_macros=macros,
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        **more,
    )


def build():
    if os.environ.get("CAPSFAST_BUILD", "1") == "0":
        return {}
    found = compiler()
    if found is None:
        raise SystemExit(
            "capsfast: no C++ compiler found. Install one (Debian: apt-get install g++), or install without "
            "the compiled kernels: CAPSFAST_BUILD=0 pip install --no-build-isolation ."
        )
    try:
        import torch
        from setuptools.errors import CCompilerError
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        raise SystemExit(
            f"capsfast: building needs torch >= {TORCH_TARGET} in this environment ({error}); pip's isolated one "
            "has none. Run: pip install torch ninja pybind11, then install again with --no-build-isolation"
        ) from error

    if found != "c++":
        os.environ["CXX"] = found  # torch would look no further than c++
    os.environ.setdefault("MAX_JOBS", str(jobs()))
    # pip puts ninja beside Python, where a shell finds ninja only in an activated environment.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])

    class Build(BuildExtension):
        def build_extensions(self):
            (ext,) = self.extensions
            # The stable ABI needs neither of these torch libraries.
            ext.libraries = [name for name in ext.libraries if name not in ("torch_python", "c10")]
            print(f"capsfast: compiling what has changed of {len(ext.sources)} files", flush=True)
            if torch.version.cuda is None:
                self.forget_stale(ext)
            try:
                super().build_extensions()
            except (RuntimeError, CCompilerError) as error:  # the compiler's own words stand above
                raise SystemExit(f"capsfast: the build failed: {error}") from None

        def copy_file(self, infile, outfile, *rest, **options):
            """Replaces the file in one step: a process that uses the old file keeps it."""
            draft = f"{outfile}.part"
            copied = super().copy_file(infile, draft, *rest, **options)
            os.replace(draft, outfile)
            return (str(outfile), copied[1])

        def forget_stale(self, ext):
            """Compiles a .cu file again if any header is newer. A CPU-only torch does not ask nvcc for the headers."""
            newest = max(Path(name).stat().st_mtime for name in ext.depends)
            for name in ext.sources:
                compiled = Path(self.build_temp, name).with_suffix(".o")
                if name.endswith(".cu") and compiled.exists() and compiled.stat().st_mtime < newest:
                    compiled.unlink()

    return {"ext_modules": [extension(wanted_toolkit())], "cmdclass": {"build_ext": Build}}


if __name__ == "__main__":
    # Without NumPy torch warns at every import; a build needs no NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    # An archive of the sources, and pip's question what a build requires, need no torch.
    compiles = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"} & {*sys.argv}
    setup(**(build() if compiles or not {"egg_info", "sdist"} & {*sys.argv} else {}))
