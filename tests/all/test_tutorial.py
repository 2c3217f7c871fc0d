"""examples/tutorial.ipynb runs from top to bottom, and its stored outputs are what the cells print and draw.

The cells run as a program, in a separate process, because the extra ``examples`` does not include Jupyter.
docs/contributing.md has the command that stores the outputs of a new run.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import capsfast

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")
# Runs between two cells. Like Jupyter it draws the figures that a cell leaves open.
AFTER = """
for _number in plt.get_fignums():
    plt.figure(_number).canvas.draw()
    print("<figure>")
plt.close("all")
print("<next cell>")
"""


def notebook() -> Any:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def code_cells() -> list[Any]:
    return [cell for cell in notebook()["cells"] if cell["cell_type"] == "code"]


def shown(output: Any) -> str:
    """A stored output: printed text or a picture. Anything else, such as an error, is refused."""
    if output["output_type"] == "stream" and output["name"] == "stdout":
        return "".join(output["text"])
    assert output["output_type"] == "display_data" and set(output["data"]) == {"image/png", "text/plain"}, output
    return "<figure>\n"


def without_numbers(text: str) -> str:
    """Numbers, and the columns of their tables, differ on other machines."""
    return " ".join(NUMBER.sub("0", text).split())


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The output of each cell, in a folder outside the checkout."""
    for needed in ("matplotlib", "sklearn"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("tutorial")
    program = folder / "tutorial.py"
    program.write_text("".join("".join(cell["source"]) + AFTER for cell in code_cells()), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split("<next cell>\n")[:-1]


@pytest.mark.slow
@pytest.mark.skipif(not capsfast.backends()["cpp"].available, reason="the reference backend is not faster")
def test_every_cell_prints_and_draws_what_is_stored(printed: list[str]) -> None:
    stored = ["".join(map(shown, cell["outputs"])) for cell in code_cells()]
    assert list(map(without_numbers, printed)) == list(map(without_numbers, stored))


@pytest.mark.slow
@pytest.mark.skipif(not capsfast.backends()["cpp"].available, reason="the reference backend is not faster")
def test_the_layer_is_fused_and_both_networks_learn(printed: list[str]) -> None:
    text = "".join(printed)
    assert re.search(r"^digits +DigitCaps +fused ", text, re.MULTILINE)
    assert re.search(r"^Calls\(fused=\d+, own=0, ", text, re.MULTILINE)
    outputs, definition = map(float, re.findall(r"largest difference.*: (\S+)", text))
    assert outputs < 1e-6 and definition < 1e-13
    assert "gradcheck: True" in text
    [(before, after)] = re.findall(r"step: (\S+) ms before, (\S+) ms after", text)
    assert float(after) < float(before)
    accuracies = [float(match) for match in re.findall(r"epoch 5: .* test accuracy (\S+)%", text)]
    assert len(accuracies) == 2 and min(accuracies) > 95, text


def test_outputs_are_of_one_run_in_order_and_hold_nothing_of_a_machine() -> None:
    found, cells = notebook(), code_cells()
    texts = [shown(output) for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum("<figure>" in text for text in texts) == 3
    assert found["metadata"] == {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    assert all(cell["metadata"] == {} for cell in found["cells"])
    assert not re.search(r"(?<![\w.])[/~][\w.-]+/|site-packages|[A-Z]:\\", "".join(texts))
    assert NOTEBOOK.stat().st_size < 300_000
