"""Commands in the documentation of training."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("jsonargparse")

from typer.main import get_command

from capsfast.cli import early, training
from capsfast.cli.app import OF_LIGHTNING, app

from ..support.commands import done, record_in, trained
from ..support.stored_files import write_smallnorb

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / "training.md", DOCS / "gallery.md"]
COMMANDS = [
    line.partition("-m capsfast ")[2]
    for page in PAGES
    for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if "-m capsfast " in line
]
# The user's own classes that the pages name.
MY_MODULE = """
import torch
import capsfast
from lightning.pytorch.callbacks import Callback

class MyCallback(Callback):
    pass

class MyRouting(capsfast.nn.AgreementRouting):
    pass

class MyNet(torch.nn.Module):
    def __init__(self, num_classes, width=8):
        super().__init__()

def my_loss(activations, labels):
    return activations.sum(1)
"""


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_commands_are_commands(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parses commands with all their options. Other tests run them, with less data."""
    name, *words = shlex.split(line)
    if name not in OF_LIGHTNING:
        get_command(app).resolve_command(None, [name])[1].make_context(name, words)
        return
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    # The named files do not exist, so they are not read.
    with monkeypatch.context() as there:
        for asks in ("exists", "is_file"):
            there.setattr(Path, asks, lambda self: True)
        asked = early.asked(name, words)
    fakes = {"_of_checkpoint": lambda self, path: {"seed": 0}, "model": None, "datamodule": None}
    fakes |= dict.fromkeys(("instantiate_classes", "fit", "validate"), lambda self, *_, **__: None)
    for each, fake in fakes.items():
        monkeypatch.setattr(training.Command, each, fake, raising=False)
    training.run(name, asked)


def test_smallnorb_trains_from_its_files_by_the_documented_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    write_smallnorb(tmp_path / "norb", size=96)
    monkeypatch.chdir(tmp_path)
    (words,) = (shlex.split(line) for line in COMMANDS if "--data smallnorb" in line)
    last = trained(tmp_path / "out", *words[1:], "--batch-size", "10", "--accelerator", "cpu")
    record = record_in(tmp_path / "out")
    assert record["steps"] == 2 and record["model"]["in_channels"] == 2 and record["model"]["image_size"] == 32
    assert "of 10 right" in done("evaluate", last, "--data-dir", "norb")


def test_documented_commands_are_found() -> None:
    assert len(COMMANDS) >= 10
