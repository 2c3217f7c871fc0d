"""What goes on in a command that takes minutes: a bar on a terminal, lines in a log file."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

EVERY = 30.0  # seconds after which a log file says again what goes on


class Reporter(Protocol):
    """What :func:`progress` gives.

    step: what is done now. Lines name the first step after an advance at once, later ones when EVERY seconds have
    passed. advance: n more of the total are done. print: something that stays, text as it is.
    """

    def step(self, text: str) -> None: ...

    def advance(self, n: int = 1) -> None: ...

    def print(self, shown: RenderableType) -> None: ...


def plain(shown: RenderableType) -> RenderableType:
    """Text without markup: brackets in a message are brackets."""
    return Text(shown) if isinstance(shown, str) else shown


class _Bar:
    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)

    def step(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def advance(self, n: int = 1) -> None:
        self._bar.advance(self._task, n)

    def print(self, shown: RenderableType) -> None:
        self._bar.console.print(plain(shown), soft_wrap=isinstance(shown, str))


class _Lines:
    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._done = 0
        self._text = ""
        self._begin = self._said = time.monotonic()
        self._fresh = True
        self._over = threading.Event()
        # The thread that repeats and the one that works write whole lines.
        self._lock = threading.RLock()

    def step(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._fresh:
                self._say()

    def advance(self, n: int = 1) -> None:
        with self._lock:
            self._done += n
            self._fresh = True

    def print(self, shown: RenderableType) -> None:
        with self._lock:
            self._console.print(plain(shown), soft_wrap=isinstance(shown, str))
            # A log file is read while it grows.
            self._console.file.flush()
            self._said = time.monotonic()

    def _say(self) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        self._fresh = False
        self.print(f"[{minutes}:{seconds:02}] {self._done} of {self._total} done; {self._text}")

    def repeat(self) -> None:
        while not self._over.wait(max(0.0, self._said + EVERY - time.monotonic())):
            with self._lock:
                if time.monotonic() - self._said >= EVERY:
                    try:
                        self._say()
                    except (OSError, ValueError):  # nobody reads any more; the thread that works finds out by itself
                        return

    def end(self) -> None:
        self._over.set()


@contextmanager
def progress(total: int, console: Console | None = None) -> Iterator[Reporter]:
    """A bar that vanishes at the end where ``console`` is a terminal, else flushed lines; default standard output."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        # The rest of the line; without a limit a long text would take the bar's place.
        rest = Column(no_wrap=True, overflow="ellipsis", max_width=max(20, console.width - 40))
        what = TextColumn("{task.description}", markup=False, table_column=rest)
        columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), what)
        with Progress(*columns, console=console, transient=True) as bar:
            yield _Bar(bar, total)
        return
    lines = _Lines(console, total)
    repeating = threading.Thread(target=lines.repeat, daemon=True)
    repeating.start()
    try:
        yield lines
    finally:
        lines.end()
        repeating.join()
