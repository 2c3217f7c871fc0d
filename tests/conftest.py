"""Options and fixtures of all tests.

python -m pytest tests                      every backend that is available
python -m pytest tests --backends cpp       only these; one that is missing is an error, as CI wants it
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without a GPU the Triton kernels are interpreted. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import capsfast

from .support.backends import EMULATED, Backend, Shape, available
from .support.interpreter import quicken

quicken()

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


MARKERS = (
    "shapes(*shapes): run with backend and shape, for the shapes that the backend is meant for",
    "fused: only for backends with ops of their own",
    "needs(*dtypes): only for backends that serve these dtypes, beyond the one of a parameter dtype",
    "kernels: of what kernels compute, also for those that only the tests can run",
    "emulated(**values): an emulated backend runs only these values of the parameters",
)


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


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


def _is_for(item: pytest.Item, backend: object, parameters: dict[str, Any]) -> bool:
    """The backend serves what the test asks for, and has the time for its parameters."""
    if not isinstance(backend, Backend):
        return False  # pytest's mark of a test without a shape that fits
    if item.get_closest_marker("fused") and not backend.fused:
        return False
    if backend == EMULATED and not item.get_closest_marker("kernels"):
        return False
    needed = {parameters["dtype"]} if "dtype" in parameters else set()
    for marker in item.iter_markers("needs"):
        needed |= set(marker.args)
    if not needed <= set(backend.dtypes):
        return False
    few = [marker.kwargs for marker in item.iter_markers("emulated") if backend.emulated]
    return all(parameters[name] in values for kwargs in few for name, values in kwargs.items())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left_out = [], []
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        fits = "backend" not in parameters or _is_for(item, parameters["backend"], parameters)
        (kept if fits else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept
    if not config.option.collectonly and any(_backend_of(item) == EMULATED for item in kept):
        from .emulator.backend import install

        install()


def _backend_of(item: pytest.Item) -> object:
    return (
        item.callspec.params.get("backend") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    )


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
