"""Routing by all contenders, over the number of capsules; see README.md beside this file."""

from collections.abc import Callable


def test_routing(compare: Callable[[], None]) -> None:
    compare()
