"""What type checkers see of an installed package: where it is, the types of calls, and options that are words."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from capsfast import compat, models, nn

from ..support.packages import built, copied_checkout

# An error that is not ignored is one that a user would see, and an ignored line without an error is an error too.
PROGRAM = """
import torch
from typing_extensions import assert_type

import capsfast
from capsfast import compat, models, nn

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Routed = Tensor | nn.Capsules


class Mine(nn.Routing):
    def route(self, votes: nn.Votes, activation: Tensor | None) -> nn.Capsules:
        s = votes.moments().first
        return nn.Capsules(s, s.square().sum(2))


def calls(u: Tensor, flag: bool) -> None:
    layer = capsfast.DynamicRouting(6, 3, 4, 5, softmax="in", squash="unit", backend="cpp")
    assert_type(layer(u), Tensor)
    assert_type(layer(u, mask=u, return_coupling=True), Pair)
    assert_type(layer(u, return_coupling=flag), Tensor | Pair)
    assert_type(nn.RoutingByAgreement()(u, 3, bias=u), Tensor)
    assert_type(nn.RoutingByAgreement()(u, return_coupling=True), Pair)
    assert_type(nn.ConvCaps2d(6, 3, 4, 5, 3)(u), Tensor | nn.Capsules)
    assert_type(nn.ConvCaps2d(6, 3, 4, 5, 3)(u, return_coupling=True), tuple[Tensor | nn.Capsules, Tensor])
    assert_type(nn.ConvCaps1d(6, 3, 4, 5, 3)(u, return_coupling=flag), Routed | tuple[Routed, Tensor])
    assert_type(nn.ConvCaps3d(6, 3, 4, 5, 3, 1, (0, 1, 1))(u), Routed)
    assert_type(nn.ClassCaps3d(6, 3, 4, 5, (2, 3, 4))(u), nn.Capsules)
    assert_type(nn.SlimConvCaps2d(6, 3, 4, 5, 3)(u, size=(3, 3)), Tensor | nn.Capsules)
    assert_type(nn.SlimConvCaps3d(6, 3, 4, 5, 3)(u, return_coupling=True), tuple[Tensor | nn.Capsules, Tensor])
    assert_type(nn.RoutedCaps(6, 3, 4, 5, routing="em")(u), nn.Capsules)
    assert_type(nn.RoutedCaps(6, 3, 4, 5, routing=Mine)(u, u).poses, Tensor)
    assert_type(Mine(6, 3, 4, 5)(u), nn.Capsules)
    assert_type(nn.MarginLoss(reduction="sum")(u, u), Tensor)
    assert_type(nn.CapsNetLoss()(models.CapsNet()(u), u, u), nn.LossParts)
    assert_type(models.EfficientCapsNet()(u).lengths, Tensor)
    assert_type(compat.DenseCapsule(6, 3, 4, 5)(u), Tensor)
    assert_type(capsfast.dynamic_routing(u, u, return_coupling=True), Pair)
    assert_type(capsfast.accelerate(layer, u).undo(), None)
    assert_type(capsfast.graphed(layer, u)(u), Tensor)
    assert_type(capsfast.graphed(Mine(6, 3, 4, 5), u)(u), nn.Capsules)


def mistakes(u: Tensor, layer: capsfast.DynamicRouting) -> None:
    layer(u, u)  # type: ignore[call-overload]
    layer(u, masks=u)  # type: ignore[call-overload]
    nn.PrimaryCaps(1, 2, 3, 4)(u, u)  # type: ignore[call-arg]
    capsfast.DynamicRouting(6, 3, 4, 5, softmax="inn")  # type: ignore[arg-type]
    capsfast.DynamicRouting(6, 3, 4, 5, gradient="first")  # type: ignore[arg-type]
    capsfast.dynamic_routing(u, u, squash="papr")  # type: ignore[call-overload]
    capsfast.routing_pass(u, u, normalize="all")  # type: ignore[arg-type]
    nn.VectorRouting(6, 3, 4, 5, backend="gpu")  # type: ignore[arg-type]
    models.DeepCaps(squash="none")  # type: ignore[arg-type]
    nn.MarginLoss(reduction="avg")  # type: ignore[arg-type]
    capsfast.use_backend("cpu")  # type: ignore[arg-type]
    capsfast.squash(u, kind="papr")  # type: ignore[arg-type]
    capsfast.accelerated  # type: ignore[attr-defined]
"""
MODULES = {"nn": nn, "models": models, "compat": compat}
CLASSES = [
    f"{folder}.{name}"
    for folder, module in MODULES.items()
    for name in module.__all__
    if isinstance(getattr(module, name), type) and issubclass(getattr(module, name), torch.nn.Module)
]
SETTINGS = {"typeCheckingMode": "standard", "enableTypeIgnoreComments": True}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's program in a folder of its own, with an environment that has the package as the README installs it."""
    checkout, folder = copied_checkout(tmp_path_factory.mktemp("checkout")), tmp_path_factory.mktemp("user")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (packages,) = (folder / "venv").glob("lib/*/site-packages")
    with zipfile.ZipFile(built(checkout, "editable", CAPSFAST_BUILD="0")) as wheel:
        wheel.extractall(packages)
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    arguments = ", ".join(f"a{number}: {name}" for number, name in enumerate(CLASSES))
    shown = [f"    reveal_type(a{number}.__call__)" for number, _ in enumerate(CLASSES)]
    text = "\n".join([PROGRAM, f"\ndef every({arguments}) -> None:", *shown])
    (folder / "program.py").write_text(text + "\n")
    (folder / "pyrightconfig.json").write_text(json.dumps(SETTINGS | {"reportUnnecessaryTypeIgnoreComment": "error"}))
    return folder / "program.py"


def checked(program: Path, *command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    ran = subprocess.run([*command, program.name], cwd=program.parent, env=environment, capture_output=True, text=True)
    errors = [line for line in ran.stdout.splitlines() if "error:" in line]
    assert ran.returncode == 0 and not errors, "\n".join([*errors, ran.stderr])
    return ran.stdout


def test_mypy_sees_the_types_of_calls(program: Path) -> None:
    pytest.importorskip("mypy")
    python = str(program.parent / "venv" / "bin" / "python")
    said = checked(program, sys.executable, "-m", "mypy", "--strict", "--python-executable", python)
    shown = re.findall(r'Revealed type is "(.*)"', said)
    assert len(shown) == len(CLASSES) > 50
    # None of them returns Any, nor is one the call of torch.nn.Module, which takes anything.
    assert [name for name, text in zip(CLASSES, shown, strict=True) if "-> Any" in text or "def (*Any" in text] == []


def test_pyright_sees_the_types_of_calls(program: Path) -> None:
    pyright = shutil.which("basedpyright", path=Path(sys.executable).parent)
    if pyright is None:
        pytest.skip("basedpyright is not installed")
    python = str(program.parent / "venv" / "bin" / "python")
    said = checked(program, pyright, "--pythonpath", python)
    assert said.count("information: Type of") == len(CLASSES)
