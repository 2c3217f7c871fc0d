"""``import capsfast`` is light: torch, and almost nothing else."""

import inspect
import os
import subprocess
import sys

import pytest
import torch

import capsfast
from capsfast.functional import CoupledKeywords
from capsfast.passes import PassKeywords

HEAVY = ("lightning", "lightning_fabric", "pytorch_lightning", "matplotlib", "sklearn", "rich", "typer", "tensorboard")
HEAVY += ("huggingface_hub", "safetensors")
OWN = tuple(f"capsfast.{name}" for name in ("adopt", "bench", "cli", "compat", "data", "export", "models", "train"))
SHARE = 0.1


def python(code: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def test_nothing_heavy_is_imported() -> None:
    modules = set(python("import capsfast, sys; print(*sys.modules)").split())
    by_torch = set(python("import torch, sys; print(*sys.modules)").split())
    assert "capsfast.nn" in modules
    found = {name for name in modules - by_torch if name.split(".")[0] in (*HEAVY, "triton") or name.startswith(OWN)}
    assert not found
    assert not {name for name in modules - by_torch if name.startswith("torch.distributed.tensor")}
    assert {"models", "compat"} <= {*dir(capsfast)}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "own"), [("models", ()), ("data", ()), ("cli.app", ("typer", "rich"))])
def test_what_is_heavy_is_imported_when_it_is_used(module: str, own: tuple[str, ...]) -> None:
    for name in own:
        pytest.importorskip(name)
    modules = python(f"import capsfast.{module}, sys; print(*sys.modules)").split()
    assert not {*HEAVY, "torchvision"}.difference(own).intersection(modules)


@pytest.mark.slow
def test_it_costs_a_tenth_of_torch() -> None:
    """Compares CPU times of one process, so a busy or slow machine changes both; the smaller of two runs counts.

    The first run compiles the modules of the package, as after an installation. The garbage collector is off: it would
    visit all objects of torch during one of the two imports, and take as long as both.
    """
    code = """
import gc
from time import process_time
gc.disable()
start = process_time()
import torch
between = process_time()
import capsfast
from capsfast.functional import RoutingKeywords
from capsfast.passes import PassKeywords
print((process_time() - between) / (between - start))
"""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    assert min(float(python(code, kept)) for _ in range(2)) <= SHARE, torch.__version__


def test_keywords_that_functions_hand_on_are_those_of_the_signature() -> None:
    for function, keywords in ((capsfast.dynamic_routing, CoupledKeywords), (capsfast.routing_pass, PassKeywords)):
        parameters = inspect.signature(function).parameters.values()
        own = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        assert own == keywords.__annotations__.keys()
