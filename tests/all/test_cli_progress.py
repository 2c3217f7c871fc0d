"""capsfast.cli.progress: a bar on a terminal, lines elsewhere."""

import io
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

pytest.importorskip("rich")

from rich.console import Console
from rich.table import Table

from capsfast.cli import progress as module
from capsfast.cli.progress import progress

WORK = """
import sys
from capsfast.cli.progress import progress
with progress(2) as shown:
    shown.step("first [case]: checking")
    shown.step("first [case]: timing")
    shown.advance()
    shown.print("first [case]: 3 ms " + 100 * "x")
    shown.step("second: checking")
    if len(sys.argv) > 1:
        sys.stdin.read()
"""
LINES = ["[0:00] 0 of 2 done; first [case]: checking", "first [case]: 3 ms " + 100 * "x"]


def test_a_pipe_gets_plain_lines_while_the_work_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORK, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        # The child waits for its input: a line that was not flushed would never come.
        assert [child.stdout.readline().rstrip("\n") for _ in range(3)] == [
            *LINES,
            "[0:00] 1 of 2 done; second: checking",
        ]
        rest, _ = child.communicate()
    assert rest == "" and child.returncode == 0


def test_a_terminal_gets_a_bar() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdout=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    ) as child:
        os.close(theirs)
        seen = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the terminal's other end is closed
                break
            if not part:
                break
            seen += part
    os.close(ours)
    assert child.returncode == 0
    text = seen.decode()
    assert LINES[1] in text and "1/2" in text and "second: checking" in text
    assert "of 2 done" not in text


def _within(seconds: float, true: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


def test_a_long_step_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.05)
    file = io.StringIO()
    with progress(3, Console(file=file)) as shown:
        shown.step("compiling")
        shown.step("timing")
        assert _within(10, lambda: file.getvalue().count("0 of 3 done; timing") >= 2)
    said = file.getvalue()
    assert said.startswith("[0:00] 0 of 3 done; compiling\n")
    time.sleep(0.2)
    assert file.getvalue() == said


def test_advances_alone_fill_no_log_file() -> None:
    file = io.StringIO()
    with progress(1000, Console(file=file)) as shown:
        for _ in range(1000):
            shown.advance()
    assert file.getvalue() == ""


def test_tables_are_printed_whole() -> None:
    file = io.StringIO()
    table = Table("a", "b")
    table.add_row("1", "2")
    with progress(1, Console(file=file)) as shown:
        shown.print(table)
    assert "1" in file.getvalue() and "2" in file.getvalue()


def test_errors_pass_and_end_the_lines() -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), progress(1, Console(file=io.StringIO())):
        raise KeyError
    assert threading.active_count() == before
