"""Options and fixtures of all tests.

python -m pytest tests                      every backend that is available
python -m pytest tests --backends cpp       only these; one that is missing is an error, as CI wants it
"""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import capsfast

from .support.backends import Backend, Shape, available

# The same examples everywhere and in every run; "search" looks for new ones: --hypothesis-profile=search
_common = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("fixed", derandomize=True, max_examples=60, **_common)
settings.register_profile("search", derandomize=False, max_examples=2000, **_common)
settings.load_profile("fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", help="comma-separated backends to test; default: all that are available")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "shapes(*shapes): run with backend and shape, for the shapes that the backend is meant for"
    )


def _chosen(config: pytest.Config) -> list[Backend]:
    found = available()
    wanted = config.getoption("--backends")
    if wanted is None:
        return found
    by_name = {backend.name: backend for backend in found}
    for name in wanted.split(","):
        if name not in by_name:
            raise pytest.UsageError(f"--backends: {name!r} is not available: {capsfast.backends().get(name)}")
    return [by_name[name] for name in wanted.split(",")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    backends = _chosen(metafunc.config)
    marker = metafunc.definition.get_closest_marker("shapes")
    if marker is None:
        metafunc.parametrize("backend", backends, ids=str)
        return
    pairs = [
        pytest.param(backend, shape, id=f"{backend}-{shape}")
        for backend in backends
        for shape in map(Shape._make, marker.args)
        if shape.work <= backend.max_work
    ]
    metafunc.parametrize(("backend", "shape"), pairs)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


# The kernels' own scratch memory as well; read once, at its first use.
os.environ["CAPSFAST_POISON"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _fresh_memory_is_nan() -> Iterator[None]:
    """Fills every new tensor with NaN, so that an element no kernel wrote is seen. Covers C++ ops as well."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
