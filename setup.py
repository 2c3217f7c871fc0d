"""Builds ``capsfast._C``. Metadata is in pyproject.toml.

CAPSFAST_BUILD=0 installs without the extension (the reference backend remains). Otherwise a missing
compiler is an error that names the remedy.

CAPSFAST_CUDA=auto (default) adds the CUDA kernels if there is a toolkit, and either a GPU in this machine or a
TORCH_CUDA_ARCH_LIST that names GPUs ("8.0 9.0+PTX", or "all"). 1 demands the CUDA kernels, 0 leaves them out.
MAX_JOBS is the number of compilers that run at a time.

The build prints one line for each compiled file; V=1 shows whole commands.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
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
# Measured on one server core in 2026: seconds for all C++ files, and for a CUDA file and one architecture.
CXX_SECONDS, CUDA_SECONDS = 120.0, 6.5
VERBOSE = os.environ.get("V", "0") not in ("", "0")


def compiler() -> str | None:
    words = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
    for candidate in (words[0], "c++", "g++", "clang++"):
        if shutil.which(candidate):
            return candidate
    return None


def take_apart_compiler() -> list[str]:
    """Leaves one word in CXX and returns the flags that followed it.

    torch from 2.13 on takes CXX for the name of a program, and calls ccache by itself if ccache is installed.
    """
    words = os.environ.get("CXX", "").split()
    if words and Path(words[0]).name in ("ccache", "sccache"):
        words.pop(0)
    if words:
        os.environ["CXX"] = words[0]
    return words[1:]


def version() -> str:
    scope: dict[str, str] = {}
    exec((ROOT / "capsfast" / "_version.py").read_text(), scope)
    return scope["__version__"]


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
    for name in asked:
        if not re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", name):
            raise SystemExit(
                "capsfast: TORCH_CUDA_ARCH_LIST must list compute capabilities such as '8.0 9.0+PTX', or be 'all', "
                f"got {name!r}"
            )
        number = name.removesuffix("+PTX").rstrip("af")
        if number not in found.known:
            raise SystemExit(
                f"capsfast: TORCH_CUDA_ARCH_LIST asks for {number}, which the CUDA toolkit {found.version[0]}."
                f"{found.version[1]} in {found.home} does not know ({', '.join(sorted(found.known))})"
            )
        if as_numbers(number) < OLDEST_GPU:
            oldest = ".".join(map(str, OLDEST_GPU))
            raise SystemExit(f"capsfast: the CUDA kernels need compute capability {oldest} or newer, got {number}")
    return asked


def as_numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))


def gencode(names: list[str]) -> list[str]:
    """nvcc's flags. Machine code comes from the PTX of the oldest listed architecture of the same major version.

    Making PTX is the longer half of the work, and PTX for another minor version would be the same: kernels only ask
    whether the architecture is 8.0 or newer, and 9.0 or newer. An architecture with a letter, such as 9.0a, has
    features of its own.
    """
    plain = [name.removesuffix("+PTX") for name in names]
    flags = []
    for name, number in zip(names, plain, strict=True):
        kin = [other for other in plain if other.split(".")[0] == number.split(".")[0] and other[-1].isdigit()]
        oldest = min(kin, key=as_numbers) if number[-1].isdigit() else number
        digits = number.replace(".", "")
        flags.append(f"-gencode=arch=compute_{oldest.replace('.', '')},code=sm_{digits}")
        if name.endswith("+PTX"):
            flags.append(f"-gencode=arch=compute_{digits},code=compute_{digits}")
    return flags


def jobs() -> int:
    """How many compilers run at a time: as many as cores and memory allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        free = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:
        free = None
    return cores if free is None else max(1, min(cores, int(int(free[1]) / 2**20 / GIGABYTES_PER_JOB)))


def extension(found: Toolkit | None, flags: list[str]):
    import pybind11
    import torch
    from torch.utils import cpp_extension

    sources = [path.relative_to(ROOT) for suffix in ("*.cpp", "*.cu") for path in (ROOT / "csrc").rglob(suffix)]
    sources = sorted(str(path) for path in sources if found or "cuda" not in path.parts)
    headers = [path for suffix in ("*.h", "*.inl") for path in (ROOT / "csrc").rglob(suffix)]
    headers.append(ROOT / "capsfast" / "ops" / "schemas.inc")
    hidden = [f"{ROOT.resolve()}/=", f"{Path(torch.__file__).parent}/="]
    macros = [
        ("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION),
        ("CAPSFAST_TORCH_TARGET", f'"{TORCH_TARGET}"'),
        ("CAPSFAST_BUILD_TORCH", f'"{torch.__version__}"'),
        ("CAPSFAST_VERSION", f'"{version()}"'),
    ]
    # Checks put __FILE__ into their messages; this keeps the builder's folders out of the binary.
    cxx = [*flags, "-O3", "-std=c++17", "-fvisibility=hidden", "-g0", "-Wno-psabi"]
    cxx += [f"-fmacro-prefix-map={folder}" for folder in hidden]
    # The installed pybind11 goes first, because torch ships an older one.
    more = {"include_dirs": [pybind11.get_include()], "extra_link_args": [*flags]}
    nvcc = []
    if found:
        # A CPU-only torch has the headers, but looks for no toolkit.
        cpp_extension.CUDA_HOME = str(found.home)
        names = architectures(found)
        print(f"capsfast: CUDA {found.version[0]}.{found.version[1]} in {found.home}, for {' '.join(names)}")
        theirs = torch.version.cuda
        if theirs and int(theirs.split(".")[0]) < found.version[0]:
            print(
                f"capsfast: torch was built with CUDA {theirs}, the kernels will be with {found.version[0]}."
                f"{found.version[1]}: they need a driver for the newer one"
            )
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
        more["extra_link_args"] += ["-Wl,--no-as-needed", "-ltorch"]
    return cpp_extension.CppExtension(
        "capsfast._C",
        sources,
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
        from setuptools.errors import CCompilerError
        from torch.utils.cpp_extension import BuildExtension
    except ImportError as error:
        raise SystemExit(
            f"capsfast: building needs torch >= {TORCH_TARGET} in this environment ({error}). "
            "Run: pip install torch ninja pybind11, then pip install --no-build-isolation ."
        ) from error

    if shutil.which("c++") is None:
        os.environ.setdefault("CXX", found)  # torch would look no further than c++
    flags = take_apart_compiler()
    os.environ.setdefault("MAX_JOBS", str(jobs()))
    # pip puts ninja beside Python, where a shell finds ninja only in an activated environment.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])

    class Build(BuildExtension):
        def run(self):
            # Does not lock build_temp, because an editable install has a build_temp of its own.
            with one_at_a_time(Path("build")):
                super().run()

        def build_extensions(self):
            for ext in self.extensions:
                # The stable ABI needs neither of these torch libraries.
                ext.libraries = [name for name in ext.libraries if name not in ("torch_python", "c10")]
                again = any(Path(self.build_temp).rglob("*.o"))
                what = "what has changed" if again else f"{len(ext.sources)} files, {duration(ext)}"
                print(f"capsfast: compiling {what}", flush=True)
                self.forget_stale(ext)
            try:
                with brief_output():
                    super().build_extensions()
            except (RuntimeError, CCompilerError) as error:  # the compiler's own words stand above
                if VERBOSE:
                    raise
                reason = str(error).partition("\n")[0] or repr(error)
                raise SystemExit(f"capsfast: the build failed: {reason} (V=1 shows all commands)") from None

        def copy_file(self, infile, outfile, *rest, **options):
            """Replaces the file in one step: a process that imports it meanwhile finds the old file or the new file."""
            draft = f"{outfile}.part"
            try:
                copied = super().copy_file(infile, draft, *rest, **options)
                os.replace(draft, outfile)
            finally:
                Path(draft).unlink(missing_ok=True)
            return (str(outfile), copied[1])

        def forget_stale(self, ext):
            """Compiles a .cu file again if any header is newer, because ninja does not know which headers it reads."""
            newest = max(Path(name).stat().st_mtime for name in ext.depends)
            for name in ext.sources:
                compiled = Path(self.build_temp, name).with_suffix(".o")
                if name.endswith(".cu") and compiled.exists() and compiled.stat().st_mtime < newest:
                    compiled.unlink()

    return {"ext_modules": [extension(wanted_toolkit(), flags)], "cmdclass": {"build_ext": Build}}


def duration(ext) -> str:
    """How long compiling all files takes, roughly."""
    cuda = sum(name.endswith(".cu") for name in ext.sources)
    targets = sum("code=" in flag for flag in ext.extra_compile_args["nvcc"])
    asked = os.environ["MAX_JOBS"]  # ninja takes 0 for no limit, torch leaves anything else than a number alone
    at_a_time = min(int(asked) if asked.isdigit() and int(asked) else jobs(), len(ext.sources))
    seconds = (CXX_SECONDS + cuda * targets * CUDA_SECONDS) / at_a_time
    shown = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} seconds"
    return f"{at_a_time} at a time: about {shown}"


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Makes builds into one folder take turns: the second build finds what the first has compiled."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"capsfast: another build works in {folder}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield


def brief(line: str) -> str:
    """Shortens a line that ninja printed: a command that succeeded becomes the name of the compiled file."""
    step = re.match(r"\[\d+/\d+\] ", line)
    source = step and re.search(rf"-c {re.escape(str(ROOT.resolve()))}/(\S+)", line)
    return f"{step[0]}{source[1]}\n" if step and source else line


@contextlib.contextmanager
def brief_output() -> Iterator[None]:
    """Passes what this process and its children print through :func:`brief`, unless V=1."""
    if VERBOSE:
        yield
        return
    sys.stdout.flush()
    shown = os.dup(1)
    read, write = os.pipe()

    def pass_on() -> None:
        with open(read, errors="replace") as lines, open(shown, "w", closefd=False) as out:
            for line in lines:
                out.write(brief(line))
                out.flush()

    reader = threading.Thread(target=pass_on)
    os.dup2(write, 1)
    os.close(write)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(shown, 1)  # closes the last write end of the pipe, so that the reader ends
        reader.join()
        os.close(shown)


if __name__ == "__main__":
    # Without NumPy torch warns at every import; a build needs no NumPy.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    setup(**build())
