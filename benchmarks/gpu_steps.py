"""The steps of gpu_check.py that need torch, each in a process of its own."""

import argparse
import contextlib
import dataclasses
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

import capsfast
from benchmarks.gpu_check import FAMILIES, REHEARSED
from capsfast.bench import record
from capsfast.bench.cases import CANONICAL, DIRECTIONS, Case
from capsfast.bench.contenders import OURS, Contender, contender, contenders
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import Step, input_set, step
from capsfast.bench.measure import Row, first_line, measure
from capsfast.bench.report import describe, page
from tests.support import passes
from tests.support import problems as routings
from tests.support.accuracy import relative_l2
from tests.support.on_gpu import assert_replays

# The largest relative L2 error against float64. These bounds find wrong kernels; the tests know how exact kernels are.
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float64: 1e-10}
# What is timed around the canonical layer: six shapes, the important ones first.
SHAPES: Any = ({}, {"dtype": "bfloat16"}, {"I": 256, "J": 320}, {"B": 1}, {"I": 4608}, {"B": 1024, "I": 256})
KINDS: Any = ({}, {"op": "route_votes", "K": 0}, {"op": "routing", "routing": "em"})


def publish(**fact: Any) -> None:
    print("@" + json.dumps(fact), flush=True)


def machine(asked: argparse.Namespace, device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        raise SystemExit(f"torch {torch.__version__} ({built}) finds no CUDA device")
    found = record.environment(device)
    print(describe(found))
    if device.type == "cuda":
        with contextlib.suppress(OSError):
            subprocess.run(["nvidia-smi"], check=False)
    publish(machine=describe(found), environment=found)


def able(device: torch.device) -> list[Contender]:
    found = [each for each in contenders() if each.serves(device)]
    if not any(each.ours for each in found):
        raise SystemExit(f"no fused backend for {device.type}")
    return found


def problems(name: str, device: str, few: bool) -> Iterator[routings.Problem]:
    """The calls of a family: every shape, options that together take every tensor and both softmaxes, and dtypes."""
    family = {**FAMILIES, **REHEARSED}[name]
    op = next(each for each in (*routings.OPS, *passes.PASS_OPS) if each.name == family.op)
    cases: list[Any] = [routings.Case(coupling=False), routings.LOADED, routings.LOADED_OUT]
    if op in passes.PASS_OPS:
        cases = [passes.LINEAR, *passes.LINEAR_WAYS, *[passes.QUADRATIC] * (family.backend == "triton")]
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    if family.backend == "triton":
        dtypes = dtypes[:2]  # each is compiled
    elif name == "cuda-rows":
        dtypes.remove(torch.float64)  # the general kernels serve it
    if few:
        dtypes, cases = dtypes[:1], cases[:2]
    for shape in family.shapes:
        for dtype in dtypes:
            for case in cases:
                # Says the call before it runs, so that a hang names itself.
                print(family.backend, op, "x".join(map(str, shape)), case, str(dtype).removeprefix("torch."))
                yield op.make(routings.Shape(*shape), case, dtype, device)


def smoke(asked: argparse.Namespace, device: torch.device) -> None:
    """The calls of a family in one direction against float64. ``--graph``: the replay of a graph against the call."""
    family = {**FAMILIES, **REHEARSED}[asked.family]
    state, need = capsfast.backends()[family.backend], () if asked.direction == "forward" else None
    if not state.available:
        return publish(left_out=state.reason)
    if family.op == "em":
        return em(family.backend, asked.direction, device)
    worst = 0.0
    for problem in problems(asked.family, asked.device, asked.graph or asked.few):
        if asked.graph and device.type == "cuda":
            assert_replays([problem], family.backend, need)
            continue
        got = routings.run(problem, family.backend, need)
        if asked.graph or asked.few:
            assert_close(routings.run(problem, family.backend, need), got, rtol=0, atol=0)
            continue
        for name, truth in routings.run(problem.to(torch.float64), "reference", need).items():
            error, bound = relative_l2(got[name].double().cpu(), truth), BOUNDS[problem.dtype]
            # "not <=" so that NaN fails.
            if not error <= bound:
                raise SystemExit(f"{name} has relative error {error:.1e}, bound {bound:.0e}: {problem.case}")
            worst = max(worst, error / bound)
    publish(family=asked.family, direction=asked.direction, graph=asked.graph, largest_error_over_bound=worst)


def em(backend: str, direction: str, device: torch.device) -> None:
    """EM routing, whose passes are quadratic and whose updates have a kernel."""
    both = DIRECTIONS[direction == "both"]
    case = Case(5, 33, 10, 16, 8, 3, direction=both, op="routing", routing="em")
    print(case.name)
    verdict = Gate(case, input_set(case, device)).check(contender(OURS + backend).make(case))
    if verdict.reason:
        raise SystemExit(verdict.reason)
    publish(errors=verdict.errors)


def cases(device: torch.device) -> list[Case]:
    """Every shape with every kind of call, a routing only forward+backward; in a rehearsal small ones."""
    shapes = SHAPES if device.type == "cuda" else ({"B": 2, "I": 16},)
    changes = [{**shape, **kind} for shape in shapes for kind in KINDS]
    found = [dataclasses.replace(CANONICAL, direction=each, **more) for more in changes for each in DIRECTIONS]
    return [case for case in found if case.backward or not case.routing]


def calls(device: torch.device, chosen: list[Case], ours: bool) -> Iterator[tuple[str, Step]]:
    """A name and a call for each contender on each case."""
    for case in chosen:
        for each in able(device):
            if (each.ours or not ours) and not each.why_not(case, device):
                yield f"{each.name}, {case.name}", step(each.make(case), case, [input_set(case, device)])


def warm(asked: argparse.Namespace, device: torch.device) -> None:
    """Calls every contender on a share of the cases, so that the caches on the disk have the compiled code."""
    part, of = map(int, asked.share.split("/"))
    for name, call in calls(device, cases(device)[part - 1 :: of], ours=False):
        print(name)
        try:
            call()
        except Exception as error:  # the step "times" reports it again
            print(f"failed: {first_line(error)}")


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


def times(asked: argparse.Namespace, device: torch.device) -> None:
    """All contenders on every case: eager, in a CUDA graph, the host, peak memory; saved after every case."""
    surroundings, real = record.environment(device), device.type == "cuda"
    surroundings["limits"] = rates(device) if real else {}
    path = asked.out / f"{record.machine_name(surroundings['machine'])}.json"
    rows: list[Row] = []
    for case in cases(device):
        how = {"seconds": 0.0, "least_rounds": 3 if real else 1, "with_memory": real, "with_graph": not asked.no_graph}
        try:
            found = measure(case, able(device), device, **how)
        except RuntimeError as error:  # out of memory, or an asynchronous error that no contender owns
            found = [Row(case, "all", "failed", first_line(error))]
        rows += found
        record.save(path, surroundings, rows)
        publish(record=path.name, tables="## " + page([path]).partition("\n## ")[2])
        for row in found:
            spent = {"eager": row.seconds.get("median"), "graph": row.graph, "host": row.host}
            shown = [f"{key} {1e6 * value:.1f} us" for key, value in spent.items() if value is not None]
            print(f"{row.contender}, {case.name}: {', '.join(shown)} {row.status} {row.reason}")
        if case.backward:
            kernels(device, case)
    bad = [row for row in rows if row.status in ("wrong", "failed") and row.contender.startswith(("capsfast", "all"))]
    if bad:
        raise SystemExit("; ".join(f"{row.contender} on {row.case.name} {row.status}: {row.reason}" for row in bad))


def kernels(device: torch.device, case: Case) -> None:
    """The time of every kernel of a call: name, launches, microseconds of all launches."""
    kind = {"cuda": ProfilerActivity.CUDA, "cpu": ProfilerActivity.CPU}[device.type]
    for name, call in calls(device, [case], ours=True):
        try:
            call()
            with profile(activities=[kind]) as seen:
                call()
                torch.cuda.synchronize() if device.type == "cuda" else None
        except RuntimeError as error:  # the call fails, as measure() reports, or this machine has no profiler
            print(f"no times of the kernels of {name}: {first_line(error)}")
            continue
        spent = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        events = [each for each in seen.key_averages() if each.device_type.name == kind.name]
        longest = sorted(events, key=lambda each: -getattr(each, spent))[:12]
        publish(call=name, kernels=[(each.key[:80], each.count, getattr(each, spent)) for each in longest])


def profiled(asked: argparse.Namespace, device: torch.device) -> None:
    """Canonical calls forward and backward on each backend, between marks for ncu."""
    for _, call in calls(device, [each for each in cases(device) if each.backward][: len(KINDS)], ours=True):
        call()  # compiles
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


STEPS = {each.__name__: each for each in (machine, smoke, warm, times, profiled)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--family", help="the name of a row of FAMILIES")
    parser.add_argument("--direction", choices=("forward", "both"), default="both")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--few", action="store_true", help="for a sanitizer: two cases in float32, without float64")
    parser.add_argument("--share", help='a part of the cases, such as "2/6"')
    parser.add_argument("--no-graph", action="store_true", help="times without CUDA graphs")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    STEPS[asked.step](asked, torch.device(asked.device))


if __name__ == "__main__":
    main()
