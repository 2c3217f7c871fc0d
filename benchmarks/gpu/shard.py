"""A pytest plugin: one of n processes that share the tests. SHARD="2/5" keeps every fifth, from the third on."""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, of = map(int, os.environ["SHARD"].split("/"))
    others = [item for n, item in enumerate(items) if n % of != part]
    items[:] = items[part::of]
    config.hook.pytest_deselected(items=others)
