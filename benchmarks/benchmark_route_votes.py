"""capsfast.route_votes against the other ways to compute it."""

from collections.abc import Callable

from capsfast.bench.cases import Case

OP = "route_votes"


def test_route_votes(case: Case, name: str, compare: Callable[[Case, str], None]) -> None:
    compare(case, name)
