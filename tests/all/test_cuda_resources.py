"""The CUDA kernels in the built extension: each is there for every architecture; what spills is a warning."""

import os
import re
import shutil
import site
import subprocess
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch

from capsfast import native

GENERAL = ("accumulate_kernel", "row_norm_kernel", "gradient_kernel")
SIZES = ((12, 1), (20, 1), (20, 2), (24, 1))
# Bytes a thread. With 24 tiles or two steps some numbers of a loop lie in memory.
MUCH_STACK = 64


def cuobjdump() -> str | None:
    """From the CUDA toolkit, or from Triton."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    triton = [Path(folder, "triton/backends/nvidia/bin") for folder in site.getsitepackages()]
    return shutil.which("cuobjdump", path=os.pathsep.join([f"{home}/bin", *map(str, triton), os.environ["PATH"]]))


def kernels(file: str) -> list[tuple[str, str, int]]:
    """Architecture, name and bytes of stack of each kernel, such as ("sm_90", "gradient_kernel<20, 1, 1>", 24)."""
    tool = cuobjdump()
    assert tool is not None
    listing = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    found, architecture = [], ""
    for part in re.split(r"\n(?= Function|.*arch = )", listing):
        arch = re.search(r"arch = (sm_\w+)", part)
        architecture = arch[1] if arch else architecture
        if usage := re.search(r"Function (\w+):\s*REG:\d+ STACK:(\d+)", part):
            # _ZN8capsfast4cuda4rows15gradient_kernelINS1_4RowsILi20ELi1ELb1EEEEEvNS1_12GradientArgsE
            name = re.search(r"\d([a-z_]+_kernel)", usage[1])
            rows = re.search(r"4RowsILi(\d+)ELi(\d)ELb([01])E", usage[1])
            way = re.search(r"EELb([01])EEEv", usage[1])
            traits = [*(rows.groups() if rows else ()), *(way.groups() if rows and way else ())]
            if name:
                found.append((architecture, name[1] + (f"<{', '.join(traits)}>" if rows else ""), int(usage[2])))
    return found


def test_every_kernel_is_there_for_every_architecture() -> None:
    if native.extension is None or not native.extension.build_info()["cuda"]:
        pytest.skip("the extension was built without CUDA kernels")
    if cuobjdump() is None:
        pytest.skip("no cuobjdump (it comes with CUDA toolkits and with Triton)")
    rows = [f"<{tiles}, {steps}, {exact}" for tiles, steps in SIZES for exact in "01"]
    wanted = [f"accumulate_kernel{traits}, {backward}>" for traits in rows for backward in "01"]
    wanted += [f"gradient_kernel{traits}>" for traits in rows]
    all_kernels = kernels(str(native.extension.__file__))
    names = native.extension.build_info()["cuda_architectures"].replace("+PTX", "").replace(".", "").split()
    for architecture in (f"sm_{name}" for name in names):
        here = [(name, stack) for arch, name, stack in all_kernels if arch == architecture]
        assert Counter(name for name, _ in here if "<" in name) == Counter(wanted)
        assert all(sum(name == general for name, _ in here) == 4 * 2 for general in GENERAL)
        for name, stack in here:
            if stack > MUCH_STACK and "<" in name:
                warnings.warn(f"{name} on {architecture}: {stack} bytes of stack", stacklevel=1)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("name", ["f16", "rows_12_24"])
def test_a_t4_gets_the_general_kernels_and_empty_ones(name: str, tmp_path: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    source = Path(__file__).parents[2] / "csrc" / "ops" / "cuda" / "instantiations" / f"{name}.cu"
    flags = ["-std=c++17", "-O1", f"-I{include}", "-arch=sm_75", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "out")]
    ran = subprocess.run(["nvcc", *flags, str(source)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", ran.stderr)]
    assert registers and (max(registers) < 16) == name.startswith("rows"), registers
