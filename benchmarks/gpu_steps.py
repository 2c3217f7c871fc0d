"""The steps of gpu_check.py that need torch, each in a process of its own."""

import argparse
import contextlib
import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import capsfast
from benchmarks.gpu_check import SUSPECTS, VARIANTS
from capsfast.bench import check, ran, record
from capsfast.bench.cases import CANONICAL, DIRECTIONS, Case, sweep
from capsfast.bench.contenders import COMPILED, EAGER, OURS, Contender, contenders
from capsfast.bench.gate import Gate
from capsfast.bench.inputs import input_set, step
from capsfast.bench.measure import Row, beside, first_line, lost, prepared
from capsfast.bench.memory import cuda_growth
from capsfast.bench.report import describe, page
from capsfast.bench.timing import host_seconds, interleave
from capsfast.environment import native

# What is timed around the canonical layer, the important cases first. CUDA's rows family serves ROWS.
ROWS: Any = ({}, {"dtype": "bfloat16"}, {"B": 1}, {"B": 1024, "I": 256}, {"B": 16}, {"I": 9216}, {"I": 256})
SHAPES: Any = (*ROWS, {"J": 32}, {"D": 32, "K": 32}, {"I": 256, "J": 320})
VOTES: Any = ({"op": "route_votes", "K": 0}, {"op": "route_votes", "K": 0, "dtype": "bfloat16"})
ROUTINGS: Any = ({"routing": "em"}, {"routing": "em", "dtype": "bfloat16"}, {"routing": "self-attention", "r": 0})


def publish(**fact: Any) -> None:
    print("@" + json.dumps(fact), flush=True)


def machine(asked: argparse.Namespace, device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__}, CUDA {torch.version.cuda}, finds no CUDA device")
    facts = record.environment(device)
    publish(machine=describe(facts), environment=facts, built=device.type == "cuda" and built_for(device))
    with contextlib.suppress(OSError):
        subprocess.run(["nvidia-smi"], check=False)


def built_for(device: torch.device) -> bool:
    """Whether the extension loads, has kernels for this GPU, and was built from the sources of this checkout."""
    if native.why_no_cuda() or native.why_not_on(device) or native.extension is None:
        return False
    return bool(native.extension.build_info().get("cuda_sources") == ran.cuda_sources(ran.kernel_files("cuda")))


def smoke(asked: argparse.Namespace, device: torch.device) -> None:
    """The families whose names begin with the given words against float64."""

    def told(result: check.Result) -> None:
        publish(status_of=result.status, **asdict(result))
        errors = ", ".join(f"{dtype} {error:.0e}" for dtype, error in result.errors.items())
        row = {"family": result.family, "result": result.status, "calls": f"{result.calls} of {result.of}"}
        publish(section="Smoke", row={**row, "largest errors": errors or result.absent, "s": round(result.seconds)})

    names = [name for name in check.FAMILIES if name.startswith(asked.families)]
    results = check.check_families(names, float(os.environ["STEP_SECONDS"]) - 10, told)
    if all(result.absent for result in results):
        publish(left_out=results[0].absent)
    if wrong := [result.family for result in results if result.status == check.WRONG]:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


def layer(changes: dict[str, Any], direction: str) -> Case:
    return replace(CANONICAL, direction=direction, **changes)


def cases(rehearse: bool) -> list[Case]:
    """All cases, the important ones first; in a rehearsal small ones."""
    small = {"B": 2, "I": 16} if rehearse else {}
    cases_of_layers = [layer({**shape, **small}, direction) for shape in SHAPES for direction in DIRECTIONS]
    cases_of_layers += [layer({**vote, **small}, direction) for vote in VOTES for direction in DIRECTIONS]
    cases_of_layers += [layer({**routing, "op": "routing", **small}, DIRECTIONS[1]) for routing in ROUTINGS]
    return list(dict.fromkeys(cases_of_layers))[: 6 if rehearse else None]


def layer_cases(rehearse: bool) -> list[Case]:
    """Convolutional layers; in a rehearsal small ones."""
    return sweep("smoke" if rehearse else "images", "layers")


Timed = Callable[[], None]


def tasks(rehearse: bool, device: torch.device) -> list["partial[Timed]"]:
    """What the workers measure: contenders on cases (eager einsum on one), training steps of CapsNet, the host.

    A task prepares, which compiles; its result measures and publishes. What takes the compiler longest comes first, so
    that every worker has the same share of it.
    """
    everyone = [contender for contender in contenders() if contender.serves(device)]
    ours = [contender for contender in everyone if contender.ours]
    if not ours:
        raise SystemExit(f"no fused backend for {device.type}")
    names, dtypes = ("einsum", "capsfast"), (torch.float32, torch.bfloat16)
    nets = [partial(net_task, name, dtype) for name in names for dtype in dtypes]
    whole = [partial(net_task, f"{name}, compiled whole", dtype) for name in names for dtype in dtypes]
    chosen = cases(rehearse)
    rows = {contender.name: [partial(contender_task, contender, case) for case in chosen] for contender in everyone}
    compiled, rows[EAGER] = rows.pop(COMPILED), rows[EAGER][:1]
    others = [*nets, *(task for of_shape in rows.values() for task in of_shape)]
    hosts = [partial(host_task, contender, layer({}, direction)) for direction in DIRECTIONS for contender in ours]
    return others if rehearse else [*whole, *compiled, *others, *hosts]


def layer_tasks(rehearse: bool, device: torch.device) -> list["partial[Timed]"]:
    """What the workers measure of convolutional layers: all contenders, in a rehearsal without torch.compile."""
    # What takes the compiler longest comes first, see tasks().
    chosen = sorted(layer_cases(rehearse), key=lambda case: not case.backward)
    able = sorted(contenders(), key=lambda contender: contender.name != COMPILED)
    return [
        partial(contender_task, contender, case)
        for contender in able
        if contender.serves(device) and not (rehearse and contender.name == COMPILED)
        for case in chosen
    ]


def variant_tasks(asked: argparse.Namespace) -> list["partial[Timed]"]:
    """What a worker with settings of its own measures: calls that rows serves without them; without early starts also
    the kernels of all calls."""
    backend = OURS + ("cpp" if asked.rehearse else "cuda")
    ours = [
        replace(contender, name=f"{backend} {asked.share}") for contender in contenders() if contender.name == backend
    ]
    chosen = cases(asked.rehearse)
    apart = "CAPSFAST_PDL" in VARIANTS[asked.share]
    kernels = [case for case in chosen if apart and case.backward and not case.routing]
    pairs = [(contender_task, case) for case in chosen[: 2 * len(ROWS)]] + [(kernel_task, case) for case in kernels]
    return [partial(task, contender, case) for contender in ours for task, case in pairs]


def contender_task(contender: Contender, case: Case, device: torch.device) -> Timed:
    """Compares a contender with float64; measures a row."""
    row, call = Row(case, contender.name, "skipped", contender.why_not(case, device)), None
    if not row.reason:
        inputs = input_set(case, device)
        row, call = prepared(case, contender, [inputs], Gate(case, inputs))
    if call is None:
        publish(measured=asdict(row))
        return lambda: None

    def timed() -> None:
        measured = replace(row, seconds=asdict(interleave({"": call}, device, 0.0, 2)[""]))
        if device.type == "cuda":
            measured = beside(call, replace(measured, memory_bytes=cuda_growth(call, case, device)), device)
        publish(measured=asdict(measured))

    return timed


def net_task(name: str, dtype: torch.dtype, device: torch.device) -> Timed:
    """A training step of CapsNet on 128 images, eager; in 16 bits with autocast."""
    on_gpu = device.type == "cuda"
    count, before = 128 if on_gpu else 2, torch.cuda.memory_allocated() if on_gpu else 0
    images, labels = torch.rand(count, 1, 28, 28, device=device), torch.randint(10, (count,), device=device)
    model = capsfast.models.CapsNet(backend="reference" if "einsum" in name else None).to(device)
    loss, optimizer = capsfast.nn.MarginLoss(), torch.optim.Adam(model.parameters(), fused=on_gpu)
    forward = torch.compile(model) if "compiled" in name else model

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = forward(images, labels)
            error = loss(found.lengths, labels) + 5e-4 * (found.reconstruction - images).square().sum() / count
        error.backward()
        optimizer.step()

    row = {"network": name, "dtype": str(dtype).removeprefix("torch.")}
    for _ in range(3):
        train()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        train()
        row["peak MiB"] = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}"

    def timed() -> None:
        ms = f"{1e3 * interleave({'': train}, device, 0.0, 3)[''].median:.2f}"
        publish(section=f"Training step of CapsNet, {count} images", row={**row, "ms": ms})

    return timed


def host_task(contender: Contender, case: Case, device: torch.device) -> Timed:
    """The host's part of a call, with the threads of autograd and with the calling thread alone."""
    call = step(contender.make(case), case, [input_set(case, device)])
    call()

    def timed() -> None:
        microseconds = {}
        for title, threads in (("µs", True), ("µs, autograd on the calling thread", False)):
            with torch.autograd.set_multithreading_enabled(threads):
                microseconds[title] = f"{1e6 * host_seconds(call, device):.0f}"
        publish(section="Host", row={"backend": contender.name, "call": case.name, **microseconds})

    return timed


def kernel_task(contender: Contender, case: Case, device: torch.device) -> Timed:
    """The time of each kernel, or on a CPU of each op, in a call; the mean of some calls."""
    call, calls, kind = step(contender.make(case), case, [input_set(case, device)]), 20, device.type
    call()

    def timed() -> None:
        with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind.upper())]) as profile:
            for _ in range(calls):
                call()
            torch.cuda.synchronize() if kind == "cuda" else None
        for average in profile.key_averages():
            us = average.self_device_time_total if kind == "cuda" else average.self_cpu_time_total
            if us:
                row = {"call": case.name, "kernel": kernel_name(average.key), "launches": average.count / calls}
                publish(section=f"Kernels of {contender.name}", row={**row, "µs of all launches": us / calls})

    return timed


def kernel_name(key: str) -> str:
    """A kernel of capsfast as the profiler calls it, without the arguments and the namespaces that all share."""
    return re.sub(r"^void |capsfast::cuda::|\([^()]*\)$", "", key)


def rates(device: torch.device) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and FLOP per second of matrix products on the GPU."""
    from triton.testing import do_bench

    def seconds(call: Callable[[], object]) -> float:
        return float(do_bench(call, return_mode="median")) / 1e3

    size = 8192
    source = torch.empty(2**29, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    reached = {"copy_bytes_per_second": 2 * source.nbytes / seconds(lambda: target.copy_(source))}
    for name, dtype in (("matmul", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        reached[f"{name}_flops_per_second"] = 2 * size**3 / seconds(lambda a=a, b=b: a @ b)  # type: ignore[misc]
    torch.backends.cuda.matmul.allow_tf32 = False
    return reached


def times(asked: argparse.Namespace, device: torch.device) -> None:
    """A share of the tasks, such as 2/6, or the tasks of a variant."""
    part, _, of = asked.share.partition("/")
    todo = tasks(asked.rehearse, device)[int(part) - 1 :: int(of)] if of else variant_tasks(asked)
    before: list[Timed] = [lambda: publish(limits=rates(device))] if part == "1" and device.type == "cuda" else []
    take_turns(asked, device, todo, before)


def layers(asked: argparse.Namespace, device: torch.device) -> None:
    """A share of the convolutional layers."""
    part, of = map(int, asked.share.split("/"))
    take_turns(asked, device, layer_tasks(asked.rehearse, device)[part - 1 :: of])


def take_turns(
    asked: argparse.Namespace, device: torch.device, todo: Sequence["partial[Timed]"], before: Sequence[Timed] = ()
) -> None:
    """Prepares tasks, then measures them in turns with the other workers. before: what is measured before them.

    Who prepares shares a lock, so that nobody has a turn before all are ready, at most for 150 s.
    """
    end, folder = time.monotonic() + 150, asked.out / "gpu-check"
    ready, failed = [*before], list[str]()
    torch._dynamo.config.recompile_limit = 999  # one function, many shapes
    with (folder / "preparing").open("a") as preparing, (folder / "turn").open("a") as turn:
        fcntl.flock(preparing, fcntl.LOCK_SH)
        for task in todo:
            print("prepares", *task.args)
            try:
                ready.append(task(device))
            except Exception as error:  # the others go on; rows of contenders have their errors
                failed.append(f"{' '.join(map(str, task.args))}: {first_line(error)}")
            if lost(device):
                raise SystemExit(f"the GPU is lost; {'; '.join(failed)}")
            torch.cuda.empty_cache()  # the other workers need memory, too
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(preparing, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        else:
            publish(section="Times that may be too long", row={"worker": asked.share, "why": "others still compiled"})
        fcntl.flock(preparing, fcntl.LOCK_UN)
        for timed in ready:
            fcntl.flock(turn, fcntl.LOCK_EX)
            try:
                timed()
            except Exception as error:  # such as out of memory
                failed.append(f"in a turn: {first_line(error)}")
            fcntl.flock(turn, fcntl.LOCK_UN)
    if failed:
        raise SystemExit("; ".join(failed))


def record_of(asked: argparse.Namespace, device: torch.device) -> None:
    """Writes the record and its tables from the facts of all steps so far."""
    folder = asked.out / "gpu-check"
    facts = [json.loads(line) for line in (folder / "check.jsonl").read_text(encoding="utf-8").splitlines()]
    surroundings = next(fact["environment"] for fact in facts if "environment" in fact)
    if settings := [f"{name}=0" for name in SUSPECTS.values() if os.environ.get(name) == "0"]:
        surroundings["note"] = f"With {' and '.join(settings)}"
    surroundings["limits"] = next((fact["limits"] for fact in facts if "limits" in fact), {})
    rows = {(row.case, row.contender): row for row in (Row.from_dict(f["measured"]) for f in facts if "measured" in f)}
    order = {case: n for n, case in enumerate([*cases(asked.rehearse), *layer_cases(asked.rehearse)])}
    ordered = sorted(rows.values(), key=lambda row: (order[row.case], row.contender))
    # The record of a rehearsal is none that `capsfast report` should find.
    path = (folder if asked.rehearse else asked.out) / f"{record.machine_name(surroundings['machine'])}.json"
    record.save(path, surroundings, ordered)
    publish(record=path.name, tables="## " + page([path]).partition("\n## ")[2])
    if bad := [row for row in ordered if row.status in ("wrong", "failed") and row.contender.startswith(OURS)]:
        raise SystemExit("; ".join(f"{row.contender} on {row.case.name} {row.status}: {row.reason}" for row in bad))


def profiled(asked: argparse.Namespace, device: torch.device) -> None:
    """A canonical call forward and backward between marks for ncu."""
    case = layer({}, DIRECTIONS[1])
    (contender,) = [contender for contender in contenders() if contender.name == OURS + asked.backend]
    call = step(contender.make(case), case, [input_set(case, device)])
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


STEPS = {function.__name__: function for function in (machine, smoke, times, layers, profiled)} | {"record": record_of}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=tuple(STEPS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend")
    parser.add_argument("--families", help="how their names begin")
    parser.add_argument("--share", help="a part of the tasks, such as 2/6, or a variant, whose variables are set")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    asked.rehearse = asked.device == "cpu"
    torch.manual_seed(0)
    STEPS[asked.step](asked, torch.device(asked.device))


if __name__ == "__main__":
    main()
