"""Checks a wheel: its ABI, and that it works in an environment without capsfast's sources.

python .ci/wheel.py dist/capsfast-*.whl       run this with the torch that the wheel is for
"""

import argparse
import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

USE = """
import sys, torch, capsfast
assert capsfast.__file__.startswith(sys.prefix), capsfast.__file__
from capsfast import models, native
assert "mnist" in models.EfficientCapsNet._shipped()
u, weight = torch.randn(3, 7, 8), 0.1 * torch.randn(7, 5, 16, 8)
wanted = capsfast.dynamic_routing(u, weight, backend="reference")
if sys.argv[1:] == ["any"]:
    assert native.extension is None and "the wheel for any platform" in native.why_absent, native.why_absent
    sys.exit(print("torch", torch.__version__ + ", no compiled part:", native.why_absent))
assert native.extension is not None, native.why_absent
torch.testing.assert_close(capsfast.dynamic_routing(u, weight, backend="cpp"), wanted)
has_cuda = torch._C._dispatch_has_kernel_for_dispatch_key("capsfast::dynamic_routing", "CUDA")
info = native.extension.build_info()
assert has_cuda == bool(info["cuda"])
kernels = "CUDA kernels for " + info["cuda_architectures"] if has_cuda else "no CUDA kernels"
print("torch", torch.__version__ + ",", kernels)
"""


def output_of(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{ran.stdout}{ran.stderr}")
    return ran.stdout


def check_abi(library: Path) -> None:
    """torch-abi-audit fails if the library needs more of torch than the stable ABI."""
    audit = shutil.which("torch-abi-audit", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if audit is None:
        raise SystemExit("torch-abi-audit is missing: pip install torch-abi-audit")
    report = output_of(audit, "--check", "torch", str(library))
    print("ABI:", ", ".join(line.strip() for line in report.splitlines() if "ABI:" in line or "Min torch" in line))


def check_use(wheel: Path, folder: Path, *kind: str) -> None:
    """Installs and runs the wheel in an environment that has only torch and torch's dependencies."""
    home = folder / "environment"
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    output_of(str(python), "-m", "pip", "install", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel))
    theirs = output_of(str(python), "-c", "import site; print(site.getsitepackages()[0])").strip()
    # Python imports packages from a folder in a .pth file, but reads no .pth file there, such as an editable install's.
    Path(theirs, "torch.pth").write_text("\n".join(site.getsitepackages()))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CAPSFAST"))}
    ran = subprocess.run([str(python), "-c", USE, *kind], capture_output=True, text=True, cwd=folder, env=clean)
    if ran.returncode != 0:
        raise SystemExit(f"{wheel.name} does not work in a clean environment:\n{ran.stderr}")
    print("in a clean environment:", ran.stdout.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    wheel = parser.parse_args().wheel.resolve()
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        inside = [member for member in archive.namelist() if re.search(r"_C\..*\.so$", member)]
        if bool(inside) == wheel.name.endswith("-none-any.whl"):
            raise SystemExit(f"{wheel.name} holds {'an' if inside else 'no'} extension")
        for library in (Path(archive.extract(member, name)) for member in inside):
            check_abi(library)
        check_use(wheel, Path(name), *([] if inside else ["any"]))
    print(f"{wheel} ({wheel.stat().st_size / 2**20:.1f} MiB)")


if __name__ == "__main__":
    main()
