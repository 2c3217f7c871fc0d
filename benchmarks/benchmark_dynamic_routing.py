"""capsfast.dynamic_routing against the other ways to compute it."""

from collections.abc import Callable

from capsfast.bench.cases import Case

OP = "dynamic_routing"


def test_dynamic_routing(case: Case, name: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, name)
