"""Tests of calls that are refused."""

from collections.abc import Callable
from typing import Any

import pytest

Refusal = tuple[Callable[[], Any], type[Exception], str]


def refusals(cases: dict[str, Refusal]) -> Callable[[str], None]:
    """A test with a row for each of these calls: its error, and a part of the message."""

    @pytest.mark.parametrize("case", cases)
    def test(case: str) -> None:
        call, error, message = cases[case]
        with pytest.raises(error, match=message):
            call()

    return test
