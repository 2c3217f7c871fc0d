"""``python -m capsfast``."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

import capsfast
from capsfast.bench import contenders, record
from capsfast.cli.app import app

RUN = CliRunner()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilation takes seconds for each case."""
    quick = [each for each in contenders.contenders() if each.name != contenders.COMPILED]
    monkeypatch.setattr("capsfast.cli.app.contenders", lambda: quick)


def test_info_names_versions_and_backends() -> None:
    result = RUN.invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    assert capsfast.__version__ in result.output
    for name, status in capsfast.backends().items():
        assert name in result.output
        assert status.reason[:10] in result.output


@pytest.mark.usefixtures("without_compiler")
@pytest.mark.parametrize("op", ["dynamic_routing", "route_votes"])
def test_bench_prints_and_writes(tmp_path: Path, op: str) -> None:
    pytest.importorskip("matplotlib")
    png, json = tmp_path / "plot.png", tmp_path / "record.json"
    result = RUN.invoke(
        app,
        ["bench", "--sweep", "smoke", "--op", op, "--seconds", "0.01", "--png", str(png), "--json", str(json)],
    )
    assert result.exit_code == 0, result.output
    assert "eager einsum" in result.output
    assert png.read_bytes().startswith(b"\x89PNG")
    _, rows = record.load(json)
    assert {row.status for row in rows} == {"ok"}
    assert {row.case.op for row in rows} == {op}


@pytest.mark.parametrize("wrong", [["--sweep", "none"], ["--op", "none"]])
def test_bench_names_the_choices(wrong: list[str]) -> None:
    result = RUN.invoke(app, ["bench", *wrong])
    assert result.exit_code == 2
    assert "must be one of" in result.output


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_one_line(missing: str) -> None:
    # A None in sys.modules makes find_spec raise, so the finder is made to miss it.
    code = f"""
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == {missing!r} else find(name, *rest)
from capsfast.cli import main
main()
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 1
    assert answer.stderr == f'capsfast: the command line needs {missing}: pip install "capsfast[cli]"\n'
