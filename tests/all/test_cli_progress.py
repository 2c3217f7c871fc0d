"""capsfast.cli.progress: a bar on a terminal, lines elsewhere."""

import io
import os
import pty
import subprocess
import sys

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
        # The child waits for input, so a line that was not flushed would never come.
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
            except OSError:  # the other end of the terminal is closed
                break
            if not part:
                break
            seen += part
    os.close(ours)
    assert child.returncode == 0
    text = seen.decode()
    assert LINES[1] in text and "1/2" in text and "second: checking" in text
    assert "of 2 done" not in text


def test_a_step_is_said_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 1.0, module.EVERY, module.EVERY + 1])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    file = io.StringIO()
    with progress(3, Console(file=file)) as shown:
        for text in ("compiling", "checking", "timing", "again"):
            shown.step(text)
    assert file.getvalue() == "[0:00] 0 of 3 done; compiling\n[0:30] 0 of 3 done; timing\n"


def test_tables_are_printed_whole_and_advances_alone_are_not() -> None:
    file = io.StringIO()
    table = Table("a", "b")
    table.add_row("1", "2")
    with progress(1000, Console(file=file)) as shown:
        for _ in range(1000):
            shown.advance()
        assert file.getvalue() == ""
        shown.print(table)
    assert "1" in file.getvalue() and "2" in file.getvalue()
