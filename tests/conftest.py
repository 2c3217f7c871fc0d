"""Options and fixtures of all tests.

python -m pytest                      the first tier: every backend that is available, a few rows of every table
python -m pytest --all                every row of every table, slow tests, tests/all, more drawn examples
python -m pytest --second             of these only what the first tier lacks
python -m pytest --rows 1             at most so many rows of a table, those with the most options
python -m pytest --backends cpp       only these backends; a missing backend is an error
python -m pytest -n 2                 in two processes (pytest-xdist)
"""

import os
import signal
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

# Waiting threads yield their core: several test processes have more threads than cores. torch reads this on import,
# also in the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from hypothesis import HealthCheck, settings

# Without a GPU the Triton kernels are interpreted. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# If a shell runs the tests in the background, the tests and the processes that they start ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import capsfast
from capsfast.environment import native

from .support import interpreter
from .support.backends import EMULATED, ROWS, Backend, available
from .support.problems import OPS, PASS_OPS, Case, Op, PassCase

interpreter.prepare()

# The same examples everywhere and in every run. To search for new examples: --hypothesis-profile=search
_common = {
    "deadline": None,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("few", derandomize=True, max_examples=15, **_common)
settings.register_profile("all", derandomize=True, max_examples=30, **_common)
settings.register_profile("search", derandomize=False, max_examples=2000, **_common)
settings.load_profile("few")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backends", help="comma-separated backends to test; default: all that are available")
    parser.addoption("--all", action="store_true", help="both tiers: every row of every table, slow tests, tests/all")
    parser.addoption("--second", action="store_true", help="the second tier: what --all adds to the first tier")
    parser.addoption("--rows", type=int, help="at most so many rows of a table")


SECOND_TIER = Path(__file__).parent / "all"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collects tests/all only with --all, or if the command line names a file in it."""
    named = any(Path(arg.split("::")[0]).resolve().is_relative_to(SECOND_TIER) for arg in config.args)
    return True if collection_path == SECOND_TIER and not named and not config.getoption("--all") else None


@pytest.fixture(autouse=True)
def _no_plans() -> None:
    """Tests change tile sizes, which a plan of launches has in it."""
    if (planned := sys.modules.get("capsfast.triton.plan")) is not None:
        planned.forget()


MARKERS = (
    "shapes(*shapes): run with each backend, op (if there is a parameter op) and shape that the backend has time for",
    "rows(n, **n_of_backend): how many rows of this test's table run in the first tier; a pair is for both tiers",
    "against_reference: compares with the backend reference, so does not run on it",
    "fused: only for backends with ops of their own",
    "kernels: tests what kernels compute, also on the emulated backend",
    "passes: op is one of the two routing passes",
    "only(weight=..., linear=False): ops with (True) or without a weight; not backends that serve only linear passes",
    "drawn: draws its examples, more of them in the second tier",
    "every_op: op is any of the four functions, case a case of this function",
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.all |= config.option.second
    # With these variables a pytest that a test starts would think that it is a worker, and warn about its measurements.
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST")]:
        del os.environ[name]
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    built = any((Path(capsfast.__file__).parent / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)
    if native.extension is None and built:
        raise pytest.UsageError(f"the extension exists but does not load: {native.why_absent}")
    if config.getoption("--all"):
        settings.load_profile("all")


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
    ops: tuple[Op, ...] = ()
    if "op" in metafunc.fixturenames:
        of_marker = {"passes": PASS_OPS, "every_op": (*OPS, *PASS_OPS), "kernels": OPS}
        ops = next((value for name, value in of_marker.items() if metafunc.definition.get_closest_marker(name)), ())
    marker = metafunc.definition.get_closest_marker("shapes")
    names = ["backend"] + ["op"] * bool(ops) + ["shape"] * (marker is not None)
    rows = []
    for backend in backends:
        for op in ops or OPS[:1]:
            shapes = (
                [shape for shape in map(op.fit, marker.args) if shape.work <= backend.max_work] if marker else [None]
            )
            for shape in dict.fromkeys(shapes):
                row = {"backend": backend, "op": op, "shape": shape}
                rows.append(pytest.param(*(row[name] for name in names), id="-".join(str(row[name]) for name in names)))
    metafunc.parametrize(names, rows)


def _runs(item: pytest.Item, parameters: dict[str, Any]) -> bool:
    """Whether op and case fit together, and the backend serves what the test asks for."""
    backend, op, case = (parameters.get(name) for name in ("backend", "op", "case"))
    if isinstance(op, Op):
        if isinstance(case, Case | PassCase) and not op.takes(case):
            return False
        for marker in item.iter_markers("only"):
            if marker.kwargs.get("weight", "weight" in op.tensors) != ("weight" in op.tensors):
                return False
    if "backend" not in parameters:
        return True
    if not isinstance(backend, Backend):
        return False  # how pytest marks a test without a fitting shape
    marked = {marker.name for marker in item.iter_markers()}
    if ("fused" in marked and not backend.fused) or ("against_reference" in marked and backend.name == "reference"):
        return False
    if backend == EMULATED and "kernels" not in marked:
        return False
    if backend.linear:
        if "passes" in marked or any(marker.kwargs.get("linear") is False for marker in item.iter_markers("only")):
            return False
        if isinstance(case, Case | PassCase) and not case.linear:
            return False
    return parameters.get("dtype", backend.dtypes[0]) in backend.dtypes


def _rows_of_the_tier(items: list[pytest.Item], everything: bool, most: int | None = None) -> list[pytest.Item]:
    """For each test, op and backend, as many rows as the tier takes. The first tier takes no slow test."""
    tables: dict[object, list[pytest.Item]] = {}
    for item in items:
        if everything or not item.get_closest_marker("slow"):
            parameters = _parameters(item)
            name = getattr(item, "originalname", item.name)
            tables.setdefault((item.parent, name, parameters.get("backend"), parameters.get("op")), []).append(item)
    kept = {item for table in tables.values() for item in _spread(table, everything, most)}
    return [item for item in items if item in kept]


def _spread(table: list[pytest.Item], everything: bool, most: int | None) -> list[pytest.Item]:
    """Rows with as many new values as possible, where each option of a case is a value. Between equal rows the last."""
    backend = _parameters(table[0]).get("backend")
    numbers = backend.rows if isinstance(backend, Backend) else (ROWS, None)
    for marker in table[0].iter_markers("rows"):
        asked = marker.kwargs.get(str(backend), marker.args[0] if marker.args else numbers)
        numbers = asked if isinstance(asked, tuple) else (asked, numbers[1])
    number = numbers[everything]
    if most is not None:
        number = most if number is None else min(number, most)
    if number is None or len(table) <= number:
        return table
    rows = [
        (item, {(name, part) for name, value in _parameters(item).items() for part in str(value).split(",")})
        for item in reversed(table)
    ]
    seen: set[tuple[str, str]] = set()
    kept = []
    while len(kept) < number:
        item, values = rows.pop(max(range(len(rows)), key=lambda n: len(rows[n][1] - seen)))
        seen |= values
        kept.append(item)
    return kept


def _of_second_tier(item: pytest.Item) -> bool:
    """Whether a test, or more of its examples, belong to the second tier although the first would take it too."""
    return item.path.is_relative_to(SECOND_TIER) or item.get_closest_marker("drawn") is not None


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    everything = config.getoption("--all")
    kept = [item for item in items if _runs(item, _parameters(item))]
    if not any("::" in arg for arg in config.args):  # a test that is named runs
        first = set(_rows_of_the_tier(kept, False)) if config.getoption("--second") else set()
        rows = _rows_of_the_tier(kept, everything, config.getoption("--rows"))
        kept = [item for item in rows if item not in first or _of_second_tier(item)]
    config.hook.pytest_deselected(items=sorted(set(items) - set(kept), key=items.index))
    items[:] = kept
    if not config.option.collectonly and any(_parameters(item).get("backend") == EMULATED for item in kept):
        from .emulator.backend import install

        install()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of 10 x 10 to train on, 20 to test on, 4 classes: 8 steps an epoch, 3 to test."""
    from .support.idx_files import write_set

    path = tmp_path_factory.mktemp("images")
    write_set(path, size=10)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of two epochs without interruption, with a test after each epoch."""
    from .support.training import trained

    out = tmp_path_factory.mktemp("whole")
    trained(folder, out)
    return out / "last.ckpt"


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Seeds with 0. Without a GPU, torch.manual_seed() would spend milliseconds on a traceback for GPUs."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


# Also fills the scratch memory and the results of the kernels. They read this once, when they first allocate.
os.environ["CAPSFAST_POISON"] = "1"


@pytest.fixture(autouse=True, scope="session")
def _fresh_memory_is_nan() -> Iterator[None]:
    """Fills every new tensor with NaN, also in C++ ops, so that a test sees an element that no kernel wrote."""
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = before
