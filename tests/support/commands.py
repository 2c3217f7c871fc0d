"""The command line, called as a function."""

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from capsfast.cli.app import app

SMALL = ["--conv-channels", "16", "--digit-dim", "8", "--batch-size", "32", "--lr", "0.01", "--accelerator", "cpu"]
CAPSNET = [*SMALL, "--primary-groups", "8"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)


def done(*arguments: object) -> str:
    """Runs a command that succeeds, and returns what it says."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return str(result.output)


def trained(out: Path, *arguments: object, epochs: int = 1) -> Path:
    done("train", *arguments, "--epochs", epochs, "--out", out)
    return out / "last.ckpt"


def record_in(out: Path) -> Any:
    return json.loads((out / "record.json").read_text())


def failed(*arguments: object, code: int = 1) -> str:
    """Runs a command that fails with a message of one line, and returns the message."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def options(**values: object) -> list[str]:
    """Each as ``--option name=value``."""
    return [word for name, value in values.items() for word in ("--option", f"{name}={value}")]


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")
