"""A pytest plugin that splits the tests among processes. SHARD="2/5" keeps every fifth test, from the third on."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, of = map(int, os.environ["SHARD"].split("/"))
    others = [item for n, item in enumerate(items) if n % of != part]
    items[:] = items[part::of]
    config.hook.pytest_deselected(items=others)
