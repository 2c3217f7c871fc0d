"""``python -m capsfast``."""

import subprocess
import sys

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import capsfast
from capsfast._install import in_the_checkout
from capsfast.cli.app import app

RUN = CliRunner()


def test_info_names_versions_and_backends() -> None:
    result = RUN.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    assert capsfast.__version__ in result.output
    for name, status in capsfast.backends().items():
        assert name in result.output
        assert status.reason[:10] in result.output


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
