"""The steps that need torch, each in a process: ``python -m gpu.steps NAME --device cuda``.

A step writes its results to the file in the variable STEP_RESULT, also before it ends.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# The first setuptools that can read this pyproject.toml.
SETUPTOOLS = 77
# The time to start a case if the compiler is a contender.
CASE_SECONDS = 30.0
HOST_CALLS = 16


def publish(result: dict[str, Any]) -> None:
    """Hands ``result`` to gpu_check; the last call counts."""
    draft = Path(os.environ["STEP_RESULT"] + ".part")
    draft.write_text(json.dumps(result) + "\n")
    draft.replace(os.environ["STEP_RESULT"])


def fused(device: str) -> list[str]:
    """The backends that are available and serve ``device``. Backends that compile nothing come first."""
    import capsfast

    states = {name: each for name, each in capsfast.backends().items() if name != "reference"}
    served = [name for name, each in states.items() if each.available and device in each.devices]
    return sorted(served, key=lambda name: name == "triton")


def machine(asked: argparse.Namespace) -> None:
    if asked.device == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise SystemExit(f"torch {torch.__version__} ({built}) finds no CUDA device")
    from capsfast.bench import record
    from capsfast.bench.report import describe

    found = record.environment(torch.device(asked.device))
    publish({"said": describe(found), "environment": found})
    print(describe(found))
    if asked.device == "cuda":
        with contextlib.suppress(OSError):
            subprocess.run(["nvidia-smi"], check=False)


def build(asked: argparse.Namespace) -> None:
    """Builds the extension in place, only for the GPU of this machine, without a package index."""
    import setuptools.dist
    from torch.utils.cpp_extension import include_paths

    major, minor = torch.cuda.get_device_capability()
    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    try:
        version("pybind11")
    except PackageNotFoundError:
        # torch includes the headers of pybind11.
        sys.modules["pybind11"] = types.SimpleNamespace(get_include=lambda: include_paths()[0])  # type: ignore[assignment]
    if int(version("setuptools").split(".")[0]) < SETUPTOOLS:
        # A build in place does not need pyproject.toml.
        setuptools.dist.Distribution.parse_config_files = lambda self, *files, **options: None  # type: ignore[method-assign]
    os.chdir(ROOT)
    sys.argv = ["setup.py", "build_ext", "--inplace"]
    begin = time.monotonic()
    runpy.run_path("setup.py", run_name="__main__")
    publish({"build_seconds": time.monotonic() - begin})


def backends(asked: argparse.Namespace) -> None:
    import capsfast

    found = fused(asked.device)
    publish({"fused": found})
    for name, state in capsfast.backends().items():
        print(f"{name}: {state.reason or 'available'}")
    if not found:
        raise SystemExit(f"no fused backend for {asked.device}")


def rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and FLOP per second of matrix products on the GPU."""
    from triton.testing import do_bench

    def seconds(call: Callable[[], object]) -> float:
        return float(do_bench(call, return_mode="median")) / 1e3

    size = 8192
    source = torch.empty(2**29, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    found = {"copy_bytes_per_second": 2 * source.nbytes / seconds(lambda: target.copy_(source))}
    for name, dtype in (("matmul", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        found[f"{name}_flops_per_second"] = 2 * size**3 / seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = False
    return found


def sweep(asked: argparse.Namespace) -> None:
    """All contenders on the canonical layer and around it, important cases first, until the time is used up."""
    from capsfast.bench import record
    from capsfast.bench.cases import CANONICAL, DIRECTIONS
    from capsfast.bench.contenders import contenders
    from capsfast.bench.measure import Row, first_line, measure
    from capsfast.bench.report import page

    begin, seconds = time.monotonic(), float(os.environ["STEP_SECONDS"])
    device = torch.device(asked.device)
    varied: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"B": 1024}, {"B": 1}, {"op": "route_votes", "K": 0}]
    varied += [{"J": 320}, {"I": 4608}, {"B": 64, "I": 18432, "J": 32}, {"B": 16}, {"J": 2}, {"I": 64}, {"J": 1000}]
    if asked.rehearse:
        varied = [{"B": 2, "I": 16}, {"B": 2, "I": 16, "op": "route_votes", "K": 0}]
    cases = [dataclasses.replace(CANONICAL, direction=each, **changes) for changes in varied for each in DIRECTIONS]
    able = [each for each in contenders() if each.serves(device)]
    surroundings = record.environment(device)
    surroundings["limits"] = {} if asked.rehearse else rates(device)
    path = asked.out / f"{record.machine_name(surroundings['machine'])}{'-rehearsal' * asked.rehearse}.json"
    rows: list[Row] = []
    for n, case in enumerate(cases):
        if not asked.rehearse and seconds - (time.monotonic() - begin) < CASE_SECONDS:
            break
        how = {"seconds": 0.0, "least_rounds": 1, "with_memory": False} if asked.rehearse else {"seconds": 1.0}
        try:
            found = measure(case, able, device, **how)
        except RuntimeError as error:  # out of memory, or an asynchronous error that no contender owns
            found = [Row(case, "all", "failed", first_line(error))]
        rows += found
        record.save(path, surroundings, rows)
        publish({"record": path.name, "cases": n + 1, "not_reached": [each.name for each in cases[n + 1 :]]})
        (asked.out / "gpu-check" / "sweep.md").write_text(page([path]))
        for row in found:
            median = f"{row.seconds['median'] * 1e6:.1f} us" if row.seconds else f"{row.status}: {row.reason}"
            print(f"{case.name}: {row.contender} {median}")
    bad = [row for row in rows if row.status in ("wrong", "failed") and row.contender.startswith(("capsfast", "all"))]
    if bad:
        raise SystemExit("; ".join(f"{row.contender} on {row.case.name} {row.status}: {row.reason}" for row in bad))


def call(asked: argparse.Namespace) -> None:
    """In a separate process: seconds of the first calls, which compile, and of the host's part of a later call."""
    from capsfast.bench.cases import CANONICAL
    from capsfast.bench.contenders import OURS, contender
    from capsfast.bench.inputs import input_set, step

    small = {"B": 2, "I": 16} if asked.rehearse else {}
    case = dataclasses.replace(CANONICAL, direction="forward+backward", **small)
    where = torch.device(asked.device)
    inputs = input_set(case, where)
    forward = contender(OURS + asked.backend).make(case)
    both = step(forward, case, [inputs])
    a, b = (torch.randn(64, 64, device=where) for _ in range(2))

    def wait() -> None:
        if where.type == "cuda":
            torch.cuda.synchronize()

    def timed(run: Callable[[], object], calls: int, waits: bool) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        if waits:
            wait()
        passed = (time.perf_counter() - begin) / calls
        wait()
        return passed

    ways: dict[str, Callable[[], object]] = {
        "torch.matmul": lambda: a @ b,
        "forward": lambda: forward(*inputs.tensors),
        "forward+backward": both,
    }
    found = {f"first {name}": timed(run, 1, True) for name, run in ways.items()}
    for name, run in ways.items():
        # Few calls at a time: a full queue would make the host wait.
        found[f"host {name}"] = sorted(timed(run, HOST_CALLS, False) for _ in range(11))[5]
    print(json.dumps(found))


def cost(asked: argparse.Namespace) -> None:
    """The cost of a first call, with and without Triton's cache, and the host's cost of a later call."""
    found: dict[str, Any] = {}
    for name in fused(asked.device):
        found[name] = {}
        with tempfile.TemporaryDirectory() as cache:
            for kind in ("compiled", "from the cache"):
                words = [sys.executable, "-m", "gpu.steps", "call", "--device", asked.device, "--backend", name]
                environment = {**os.environ, "TRITON_CACHE_DIR": cache}
                told = subprocess.run(
                    words + ["--rehearse"] * asked.rehearse,
                    stdout=subprocess.PIPE,
                    text=True,
                    env=environment,
                    check=True,
                )
                found[name][kind] = json.loads(told.stdout.splitlines()[-1])
                publish({"cost": found})
                print(
                    name, kind, {key: f"{1e6 * value:.0f} us" for key, value in found[name][kind].items()}, flush=True
                )


# B, I, J, D, K: one sample; a padded tile; enough input capsules for clusters, with votes of a sample that fit no
# shared memory; many outputs.
SHAPES = ((1, 33, 10, 16, 8), (17, 21, 5, 7, 3), (2, 6000, 10, 16, 8), (33, 9, 300, 4, 4))
# Together every tensor and both softmaxes.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"softmax": "in", "leaky": True, "num_iterations": 2},
    {"gradient": "last", "num_iterations": 1},
)


def exercise(asked: argparse.Namespace) -> None:
    """Forward and backward of both ops for compute-sanitizer. Copies inputs there: initcheck sees copies."""
    import capsfast

    device = torch.device(asked.device)
    for name in fused(asked.device):
        for B, I, J, D, K in SHAPES[: asked.shapes]:
            u, weight = torch.randn(B, I, K), 0.3 * torch.randn(I, J, D, K)
            votes = torch.einsum("ijdk,bik->bijd", weight, u)
            small = {"logits": torch.randn(I, J), "bias": torch.randn(J, D)}
            masks = {"mask": torch.rand(B, I) > 0.3, "out_mask": torch.rand(B, J) > 0.3}
            for options in OPTIONS:
                for dtype in (torch.float32, torch.bfloat16):
                    for op, tensors in (("dynamic_routing", (u, weight)), ("route_votes", (votes,))):
                        leaves = [each.to(dtype).to(device).requires_grad_() for each in tensors]
                        own = {key: each.to(dtype).to(device).requires_grad_() for key, each in small.items()}
                        more = {**own, **{key: each.to(device) for key, each in masks.items()}} if options else {}
                        found = getattr(capsfast, op)(*leaves, **more, **options, return_coupling=True, backend=name)
                        leaves += own.values() if options else ()
                        gradients = [torch.randn(each.shape).to(dtype).to(device) for each in found]
                        torch.autograd.grad(found, leaves, gradients, allow_unused=True)
            print(name, B, I, J, D, K, flush=True)


def profiled(asked: argparse.Namespace) -> None:
    """The canonical layer forward and backward on each backend, between marks for ncu."""
    from capsfast.bench.cases import CANONICAL
    from capsfast.bench.contenders import OURS, contender
    from capsfast.bench.inputs import input_set, step

    device = torch.device(asked.device)
    for name in fused(asked.device):
        for dtype in ("float32", "bfloat16"):
            case = dataclasses.replace(CANONICAL, direction="forward+backward", dtype=dtype)
            run = step(contender(OURS + name).make(case), case, [input_set(case, device)])
            run()  # compiles
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            run()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()


STEPS = {each.__name__: each for each in (machine, build, backends, sweep, call, cost, exercise, profiled)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--backend")
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    STEPS[asked.step](asked)


if __name__ == "__main__":
    main()
