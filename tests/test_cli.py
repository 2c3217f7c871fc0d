"""``python -m capsfast``."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import capsfast
from capsfast.cli.app import app
from capsfast.environment.install import in_the_checkout

RUN = CliRunner()


def test_info_names_versions_backends_and_schemas() -> None:
    said, with_ops = (RUN.invoke(app, ["info", *more]).output for more in ([], ["--ops"]))
    assert capsfast.__version__ in said
    for name, status in capsfast.backends().items():
        assert name in said and status.reason[:10] in said
    assert "SymInt? J" not in said and ("SymInt? J" in with_ops) == capsfast.backends()["cpp"].available


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--help", "clusters"),
        ("--version", capsfast.__version__),
        ("train --help", "--data NAME"),
        ("train --resume none.ckpt", "does not exist"),
    ],
)
def test_what_is_known_at_once_does_not_wait_for_torch(words: str, said: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "capsfast", *words.split()]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said in answer.stdout + answer.stderr
    assert not re.search(r"\| +(torch|lightning)$", answer.stderr, re.MULTILINE)


def test_the_command_line_has_the_ops_and_the_names_of_the_package() -> None:
    """Commands import what they need. A user's module may then use any name of the package."""
    code = """
import sys
sys.argv = ["/usr/bin/capsfast"]
import capsfast
assert "torch" not in sys.modules
for name in capsfast.__all__:
    getattr(capsfast, name)
import torch
torch.ops.capsfast.dynamic_routing.default
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_models_are_listed_with_their_options_and_weights() -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    from capsfast import train
    from capsfast.models import CapsNet

    result = RUN.invoke(app, ["models", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == train.NETWORKS.keys()
    assert found["efficientcapsnet"]["pretrained"] == ["fashion-mnist", "mnist", "multi-mnist"]
    assert found["capsnet"]["parameters"] == sum(parameter.numel() for parameter in CapsNet().parameters())
    assert found["capsnet"]["class"] == "capsfast.models.CapsNet" and found["cnn"]["options"]["dropout"] == 0.5
    assert found["autoencoder"]["options"].keys() >= {"num_caps", "conv_channels"}
    text = RUN.invoke(app, ["models"], env={"COLUMNS": "200"}).stdout
    assert all(f"{option}={value}" in text for option, value in found["deepcaps"]["options"].items() if value)
    assert all(f" {name} " in text and "multi-mnist" in text for name in found)


def test_missing_extra_is_one_line() -> None:
    # A None in sys.modules would make find_spec raise, so find_spec is replaced.
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "rich" else find(name, *rest)
from capsfast.cli import main
main()
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr == f"capsfast: the command line needs rich; {in_the_checkout('cli')}\n"


def test_a_process_of_a_group_ends_without_cleanup_of_the_interpreter(tmp_path: Path) -> None:
    """gloo's threads may abort the process during that cleanup. Functions registered with atexit still run."""
    code = f"""
import atexit, sys
import torch.distributed as dist
from capsfast.cli import main
class Kept:
    def __del__(self): print("cleaned up")
kept, sys.argv = Kept(), ["capsfast", "report", "{tmp_path}/none.json"]
atexit.register(print, "at exit")
dist.init_process_group("gloo", init_method="file://{tmp_path}/meeting", rank=0, world_size=1)
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    # Some releases of gloo print a line of their own.
    assert done.returncode == 1 and done.stdout.endswith("at exit\n"), done.stdout + done.stderr
