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

from capsfast.environment import native

GENERAL = ("accumulate_kernel", "row_norm_kernel", "gradient_kernel")
SIZES = ((12, 1), (20, 1), (20, 2), (24, 1))  # tiles and steps of the rows family
COLUMNS = ((8, 0), (8, 1), (8, 2), (8, 4), (10, 0), (10, 1), (10, 2))  # of the columns family
# Bytes a thread. With 24 tiles, two steps or options some numbers of a loop lie in memory.
MUCH_STACK = 160


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
            # _ZN8capsfast4cuda7columns11pass_kernelINS1_7ColumnsILi10ELi1ELb1EEELNS1_7WeightsE2ELb0EEEvNS1_8PassArgsE
            name = re.search(r"\d([a-z_]+_kernel)", usage[1])
            sizes = re.search(r"(?:4Rows|7Columns)ILi(\d+)ELi(\d)ELb([01])E", usage[1])
            way = re.search(r"EE(?:LNS1_7WeightsE(\d))?E?Lb([01])EEEv", usage[1])
            traits = [found for match in (sizes, way) if sizes and match for found in match.groups() if found]
            if name:
                found.append((architecture, name[1] + (f"<{', '.join(traits)}>" if sizes else ""), int(usage[2])))
    return found


def test_every_kernel_is_there_for_every_architecture() -> None:
    if native.extension is None or not native.extension.build_info()["cuda"]:
        pytest.skip("the extension was built without CUDA kernels")
    if cuobjdump() is None:
        pytest.skip("no cuobjdump (it comes with CUDA toolkits and with Triton)")
    rows = [f"<{tiles}, {steps}, {exact}" for tiles, steps in SIZES for exact in "01"]
    wanted = [f"accumulate_kernel{traits}, {backward}>" for traits in rows for backward in "01"]
    wanted += [f"gradient_kernel{traits}>" for traits in rows]
    columns = [f"<{tiles}, {steps}, {exact}" for tiles, steps in COLUMNS for exact in ("0" if steps == 0 else "01")]
    wanted += [f"pass_kernel{traits}, {way}>" for traits in columns for way in ("0, 0", "1, 0", "1, 1", "2, 0", "2, 1")]
    wanted += [f"gradient_kernel{traits}>" for traits in columns]
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
@pytest.mark.parametrize("name", ["f16", "rows_12_24", "columns_8"])
def test_a_t4_gets_the_general_kernels_and_empty_ones(name: str, tmp_path: Path) -> None:
    include = Path(torch.__file__).parent / "include"
    source = Path(__file__).parents[2] / "csrc" / "ops" / "cuda" / "instantiations" / f"{name}.cu"
    flags = ["-std=c++17", "-O1", f"-I{include}", "-arch=sm_75", "-cubin", "-Xptxas", "-v", "-o", str(tmp_path / "out")]
    ran = subprocess.run(["nvcc", *flags, str(source)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    registers = [int(found) for found in re.findall(r"Used (\d+) registers", ran.stderr)]
    assert registers and (max(registers) < 16) == (name != "f16"), registers
