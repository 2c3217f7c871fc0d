"""Makes the folder that kernel-builder of the Hugging Face Hub builds a kernel repository from.

python .ci/hub.py FOLDER

It holds all that imports nothing but torch: Triton's kernels and the definitions, layers, networks, accelerate. The
compiled extension, training, the data sets and the command line stay behind. Each build has an op namespace of its own.
"""

import runpy
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("train", "data", "cli", "pretrained", "__main__.py", "plot.py", "plots.py", "__pycache__", "_C*")
# kernel-builder writes _ops.py beside it.
NAMES = """
from .._ops import add_op_namespace_prefix

NAMESPACE = add_op_namespace_prefix("").partition("::")[0]
"""
BUILD = """\
[general]
name = "capsfast"
version = 0  # the Hub's number for what may still change; releases are the package's own: {version}
edition = 5
license = "MIT"
backends = ["cpu", "cuda", "rocm"]

[torch-noarch]
pyext = ["inc", "py"]
"""
FLAKE = """\
{
  description = "Fused capsule-network routing for PyTorch";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }: kernel-builder.lib.genKernelFlakeOutputs {
    inherit self;
    path = ./.;
  };
}
"""


def main(folder: Path) -> None:
    package = folder / "torch-ext" / "capsfast"
    shutil.copytree(ROOT / "capsfast", package, ignore=shutil.ignore_patterns(*LEFT_OUT))
    names = (package / "environment" / "names.py").read_text()
    (package / "environment" / "names.py").write_text(names.replace('\nNAMESPACE = "capsfast"\n', NAMES))
    version = runpy.run_path(str(ROOT / "capsfast" / "_version.py"))["__version__"]
    (folder / "build.toml").write_text(BUILD.format(version=version))
    (folder / "flake.nix").write_text(FLAKE)
    shutil.copy(ROOT / "LICENSE", folder)


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit(f"{__doc__}\nFOLDER must be one that is not there yet")
    main(Path(sys.argv[1]))
