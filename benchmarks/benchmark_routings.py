"""Every routing of capsfast.nn over votes made in kernels, against the same over votes in memory."""

from collections.abc import Callable

from capsfast.bench.cases import ROUTING, Case

OP = ROUTING


def test_routings(case: Case, name: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, name)
