"""Routing by all contenders, over the number of capsules; see README.md in this folder."""

from collections.abc import Callable


def test_routing(compare: Callable[[], None]) -> None:
    compare()
