"""The progress of commands that take minutes: a bar on a terminal, lines in a log file."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

EVERY = 30.0  # seconds between two lines within one step


def plain(shown: RenderableType) -> RenderableType:
    """Text without markup, so that rich prints brackets as they are."""
    return Text(shown) if isinstance(shown, str) else shown


class Reporter:
    """The object that :func:`progress` yields. Without a terminal it prints lines instead of a bar."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar, self._task = bar, bar.add_task("", total=total)
        self._begin, self._said = time.monotonic(), -EVERY

    def step(self, text: str) -> None:
        """Shows the current activity. Lines: one for the first call after an advance, then every EVERY seconds."""
        self._bar.update(self._task, description=text)
        now = time.monotonic()
        if self._bar.disable and now - self._said >= EVERY:
            minutes, seconds = divmod(int(now - self._begin), 60)
            task = self._bar.tasks[0]
            self.print(f"[{minutes}:{seconds:02}] {task.completed:.0f} of {task.total:.0f} done; {text}")
            self._said = now

    def advance(self, n: int = 1) -> None:
        """Counts n more of the total as done."""
        self._bar.advance(self._task, n)
        self._said = -EVERY

    def print(self, shown: RenderableType) -> None:
        """Prints something that stays above the bar; text is printed without markup."""
        self._bar.console.print(plain(shown), soft_wrap=isinstance(shown, str))
        # Users may watch a log file while it grows.
        self._bar.console.file.flush()


@contextmanager
def progress(total: int, console: Console | None = None) -> Iterator[Reporter]:
    """A bar that vanishes at the end if ``console`` (default: standard output) is a terminal, else flushed lines."""
    console = console or Console()
    # The rest of the line. Without a limit, a long text would displace the bar.
    rest = Column(no_wrap=True, overflow="ellipsis", max_width=max(20, console.width - 40))
    what = TextColumn("{task.description}", markup=False, table_column=rest)
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), what)
    off = not console.is_terminal or console.is_dumb_terminal
    with Progress(*columns, console=console, transient=True, disable=off) as bar:
        yield Reporter(bar, total)
