"""The command line, called as a function."""

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from capsfast.cli.app import app

SMALL = ["--conv-channels", "16", "--digit-dim", "8", "--batch-size", "32", "--lr", "0.01", "--accelerator", "cpu"]
CAPSNET = [*SMALL, "--primary-groups", "8"]


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], catch_exceptions=False)


def trained(out: Path, *arguments: str, epochs: int = 1) -> Path:
    result = run("train", *arguments, "--epochs", str(epochs), "--out", out)
    assert result.exit_code == 0, result.output
    return out / "last.ckpt"


def failed(*arguments: str | Path, code: int = 1) -> str:
    """Runs a command that fails with a message of one line, and returns the message."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")
