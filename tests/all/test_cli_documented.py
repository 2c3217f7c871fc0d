"""Commands and results in the documentation of training."""

import json
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("jsonargparse")

from typer.main import get_command

from capsfast.cli import training
from capsfast.cli.app import OF_LIGHTNING, app

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
from lightning.pytorch.callbacks import Callback

class MyCallback(Callback):
    pass
"""


@pytest.mark.parametrize("line", COMMANDS)
def test_documented_commands_are_commands(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parses commands with all their options. Other tests run them, with less data."""
    name, *arguments = shlex.split(line)
    if name not in OF_LIGHTNING:
        get_command(app).commands[name].make_context(name, arguments)
        return
    (tmp_path / "my_module.py").write_text(MY_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    # The named checkpoints do not exist, so they are not read.
    monkeypatch.setattr(training.Command, "_of_checkpoint", lambda self: {"seed": 0})
    monkeypatch.setattr(training.Command, "instantiate_classes", lambda self: None)
    monkeypatch.setattr(training.Command, "_run_subcommand", lambda self, subcommand: None)
    training.run(name, arguments)


def test_documented_commands_are_found() -> None:
    assert len(COMMANDS) >= 10


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "multi-mnist"])
def test_pictures_are_by_the_commands_of_the_records(name: str) -> None:
    record = json.loads((DOCS / "records" / f"{name}.json").read_text())
    shown = [line.replace("mnist", "fashion-mnist") if name == "fashion-mnist" else line for line in COMMANDS]
    recorded = set(record["command"].split()) - {"--no-progress"}
    assert recorded in [set(f"python -m capsfast {line}".split()) for line in shown]


def test_documented_attacks_are_recorded() -> None:
    record = json.loads((DOCS / "records" / "mnist-evaluate.json").read_text())
    for name, found in record.items():
        right = f"{found['right'] / found['images']:.2%}".replace("%", " %")
        assert f"| {name} | {right} of {found['images']} |" in PAGES[1].read_text()
