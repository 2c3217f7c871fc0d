"""The folder for the Hub's kernel-builder: two builds of it in one process, beside the installed package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capsfast.environment import toolchain

ROOT = Path(__file__).parents[2]
# As kernel-builder writes it.
OPS = """
import torch

ops = torch.ops.{name}


def add_op_namespace_prefix(op_name):
    return f"{name}::{{op_name}}"
"""
# Imports two builds as the Hub's loader does, under names that say where they lie.
USE = """
import importlib.util, sys, torch, capsfast

def load(name, folder):
    spec = importlib.util.spec_from_file_location(name, f"{folder}/__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.W = torch.nn.Parameter(0.1 * torch.randn(5, 3, 8, 4))

    def forward(self, u):
        votes = torch.einsum("ijdk,bik->bijd", self.W, u)
        b = torch.zeros_like(votes[..., 0])
        for _ in range(3):
            v = capsfast.squash((b.softmax(2)[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v

first, second = load("capsfast_1f", sys.argv[1]), load("capsfast_2e", sys.argv[2])
torch.manual_seed(0)
u, weight = torch.randn(2, 5, 4), 0.1 * torch.randn(5, 3, 8, 4)
layer = capsfast.DynamicRouting(5, 3, 4, 8)
wanted = capsfast.dynamic_routing(u, weight, backend="reference")
for build in (first, second):
    assert build.backends()["triton"].available and "no extension" in build.backends()["cpp"].reason
    for backend in ("triton", "reference"):
        torch.testing.assert_close(build.dynamic_routing(u, weight, backend=backend), wanted)
    theirs = build.DynamicRouting(5, 3, 4, 8)
    theirs.load_state_dict(layer.state_dict())
    with build.use_backend("triton"):
        theirs(u).sum().backward()
    layer.zero_grad()
    with capsfast.use_backend("reference"):
        layer(u).sum().backward()
    torch.testing.assert_close(theirs.W.grad, layer.W.grad)
    assert all(getattr(build, name) is not None for name in build.__all__)
    assert "dynamic_routing" in str(build.identify(Own(), u))
names = [name for name in dir(torch.ops.capsfast_2) if not name.startswith("_")]
assert "triton_dynamic_routing" in names, names
foreign = {name.partition(".")[0] for name in sys.modules if name.startswith("capsfast")}
assert foreign == {"capsfast", "capsfast_1f", "capsfast_2e"}, foreign
"""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for number in (1, 2):
        folder = tmp_path_factory.mktemp("hub") / "kernel"
        subprocess.run([sys.executable, str(ROOT / ".ci" / "hub.py"), str(folder)], check=True)
        package = folder / "torch-ext" / "capsfast"
        (package / "_ops.py").write_text(OPS.format(name=f"capsfast_{number}"))
        found.append(package)
    return found


@pytest.mark.skipif(bool(toolchain._why_not_installed()), reason="there is no Triton that can interpret the kernels")
def test_two_builds_beside_the_installed_package(builds: list[Path]) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", USE, *map(str, builds)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr


def test_a_build_imports_torch_and_the_standard_library_alone(builds: list[Path]) -> None:
    """What is imported when it is first needed, as safetensors, may be absent."""
    # typing_extensions is a requirement of torch.
    allowed = {*sys.stdlib_module_names, "torch", "triton", "typing_extensions"}
    foreign = [
        f"{file.relative_to(builds[0])}: {name}"
        for file in builds[0].rglob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and not getattr(node, "level", 0)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if str(name).partition(".")[0] not in allowed
    ]
    assert foreign == []
