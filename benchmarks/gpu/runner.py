"""Runs steps as processes, each within its time, and keeps a record that an interruption leaves whole."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
# Between the request to stop, which lets pytest write what it has, and the end.
GRACE_SECONDS = 5.0
POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 20.0

OK, FAILED, LATE, LEFT_OUT, INTERRUPTED = "ok", "failed", "out of time", "left out", "interrupted"


@dataclass(frozen=True)
class Step:
    """One process. name: a word. seconds: the most it may take. environment: added to the process's own.

    echo: its lines go to the terminal too, not to the log alone. why_not: why it is left out, else empty.
    judge: from the exit status and the output to what is wrong, "" if nothing, and what to keep in the record.
    """

    name: str
    command: Sequence[str] = ()
    seconds: float = 60.0
    environment: Mapping[str, str] = field(default_factory=dict)
    echo: bool = True
    why_not: str = ""
    judge: Callable[[int, str], tuple[str, dict[str, Any]]] | None = None


@dataclass
class Outcome:
    """status: one of the five above. result: what the process wrote to the file STEP_RESULT, and what judge kept."""

    name: str
    status: str
    seconds: float = 0.0
    limit: float = 0.0
    reason: str = ""
    result: dict[str, Any] = field(default_factory=dict)


class _Running:
    def __init__(self, step: Step, limit: float, result: Path, say: Callable[[str, str, bool], None]) -> None:
        self.step, self.limit, self.result = step, limit, result
        self.begin = self.heartbeat = time.monotonic()
        self.stopped = ""
        self.lines: list[str] = []
        environment = {**os.environ, **step.environment, "STEP_RESULT": str(result), "STEP_SECONDS": str(limit)}
        self.process = subprocess.Popen(
            list(step.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**environment, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # so that it ends with all its children
        )
        self.reader = threading.Thread(target=self._read, args=(say,), daemon=True)
        self.reader.start()

    def _read(self, say: Callable[[str, str, bool], None]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            say(self.step.name, line.rstrip("\n"), self.step.echo)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self, status: str) -> None:
        self.stopped = status
        self.signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        # Whatever it started may have outlived it.
        self.signal(signal.SIGKILL)
        self.process.wait()

    def outcome(self) -> Outcome:
        self.reader.join(GRACE_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()
        code, step = self.process.returncode, self.step
        found = Outcome(step.name, self.stopped or OK, round(self.elapsed, 1), round(self.limit, 1))
        with contextlib.suppress(OSError, ValueError):
            found.result = json.loads(self.result.read_text())
        if step.judge is not None:
            wrong, kept = step.judge(code, "".join(self.lines))
            found.result |= kept
        else:
            wrong = "" if code == 0 else f"exit status {code}, see log.txt"
        if not self.stopped:
            found.status, found.reason = (FAILED, wrong) if wrong else (OK, "")
        elif self.stopped == LATE:
            found.reason = f"stopped after {self.limit:.0f} s" + (f"; {wrong}" if found.result.get("failed") else "")
        return found


class Runner:
    """Runs groups of steps; the steps of a group run beside each other.

    folder: for check.json, which is rewritten after every step, and log.txt. seconds: for everything.
    header: what check.json holds beside the steps.
    """

    def __init__(self, folder: Path, seconds: float, header: dict[str, Any]) -> None:
        self.folder, self.seconds = folder, seconds
        self.header = {"format": FORMAT, **header, "complete": False}
        self.outcomes: list[Outcome] = []
        self.begin = time.monotonic()
        self.interrupted = ""
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.txt").write_text("")
        self._save()

    def heed_signals(self) -> None:
        """Ctrl-C, SIGTERM and SIGHUP end the processes, then the run, with the record written."""

        def note(number: int, frame: object) -> None:
            self.interrupted = signal.Signals(number).name

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, note)

    @property
    def remaining(self) -> float:
        return self.seconds - (time.monotonic() - self.begin)

    def result(self, name: str) -> dict[str, Any]:
        """What the step of that name found, empty if it found nothing or did not run."""
        return next((each.result for each in self.outcomes if each.name == name), {})

    def _say(self, name: str, line: str, echo: bool = True) -> None:
        text = f"[{time.monotonic() - self.begin:5.0f} s] {name}: {line}"
        with self._lock:
            with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
                log.write(text + "\n")
            if echo:
                print(text, flush=True)

    def _save(self) -> None:
        steps = [vars(each) for each in self.outcomes]
        text = json.dumps({**self.header, "steps": steps}, indent=1)
        draft = self.folder / "check.json.part"
        draft.write_text(text + "\n")
        draft.replace(self.folder / "check.json")

    def _keep(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        reason = f": {outcome.reason}" if outcome.reason else ""
        self._say(outcome.name, f"{outcome.status} after {outcome.seconds:.0f} s{reason}")
        self._save()

    def run(self, groups: Iterable[Sequence[Step]]) -> bool:
        """Runs all groups; False if a signal ended that. A group is asked for when the ones before are done."""
        with tempfile.TemporaryDirectory() as scratch:
            for group in groups:
                if self.interrupted:
                    return False
                self._run_group(group, Path(scratch))
        self.header["complete"] = not self.interrupted
        self._save()
        return not self.interrupted

    def _run_group(self, group: Sequence[Step], scratch: Path) -> None:
        running: list[_Running] = []
        for step in group:
            limit = min(step.seconds, self.remaining)
            why_not = step.why_not or ("" if limit > 1 else "the time is used up")
            if why_not:
                self._keep(Outcome(step.name, LEFT_OUT, limit=step.seconds, reason=why_not))
                continue
            self._say(step.name, f"starts, at most {limit:.0f} s")
            running.append(_Running(step, limit, scratch / f"{step.name}.json", self._say))
        while running:
            time.sleep(POLL_SECONDS)
            for each in list(running):
                self._look_after(each)
                if each.process.poll() is not None:
                    running.remove(each)
                    self._keep(each.outcome())

    def _look_after(self, each: _Running) -> None:
        if each.process.poll() is None and self.interrupted:
            each.stop(INTERRUPTED)
        elif each.process.poll() is None and each.elapsed > each.limit:
            each.stop(LATE)
        elif time.monotonic() - each.heartbeat > HEARTBEAT_SECONDS:
            each.heartbeat = time.monotonic()
            self._say(each.step.name, f"{each.elapsed:.0f} s")


def python(*words: str) -> list[str]:
    return [sys.executable, *words]
