"""Compiles the Triton kernels of a call for GPUs that this machine may lack, and reports what the compiler made.

Runs as a process of its own: the tests interpret kernels, and Triton chooses to interpret or compile at import.

    python -m tests.support.triton_compile 80,90,100 < calls.json
    python -m tests.support.triton_compile signatures < calls.json
    python -m tests.support.triton_compile seconds < calls.json
    python -m tests.support.triton_compile first-call [J D K]
    python -m tests.support.triton_compile table --sm 90 --dtype float32 bfloat16 --shape 32 64 10 16 8 \\
        --case '{"num_iterations": 5}'
    python -m tests.support.triton_compile docs
    python -m tests.support.triton_compile amd < calls.json

"table" prints what the passes of a layer execute for an input capsule, "docs" writes the table of
docs/triton-kernels.md. "amd" compiles calls for toolchain.AMD.
"""

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import triton_listing
from .listing import Code

TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "uint8": "*u8"}


def record(call: dict[str, Any]) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The launches of a call's forward and backward: (kernel, arguments, keywords).

    The call's "need" lists inputs that need a gradient, "kernels" the names of the kernels to keep.
    """
    from triton.runtime.jit import JITFunction

    from tests.support import passes
    from tests.support.problems import Case, make, run

    launched: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def remember(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((self, args, kwargs))

    import torch

    run_before, JITFunction.run = JITFunction.run, remember
    try:
        options, dtype = call.get("case", {}), getattr(torch, call["dtype"])
        if call["op"] == "em_update":
            _update(call["shape"], options)
            return launched
        if call["op"].endswith("_pass"):
            problem = passes.make(call["shape"], passes.PassCase(**options), call["op"], dtype)
        else:
            problem = make(call["shape"], Case(**options), call["op"], dtype)
        if call.get("tf32"):
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        run(problem, "triton", call.get("need"))
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        JITFunction.run = run_before
    return [each for each in launched if each[0].fn.__name__ in call.get("kernels", [each[0].fn.__name__])]


def _update(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    """Forward and backward of em_update, with every gradient."""
    import torch

    from capsfast.options import EMOptions
    from capsfast.triton import em_update

    B, J, D = shape
    pair, vector = torch.zeros(B, J), torch.zeros(B, J, D)
    plain = EMOptions(1.0, 0.0, False, "variance", 0.0, "sigmoid", 1.0, False)
    tensors = (pair, vector, vector, vector, torch.zeros(J), torch.zeros(J), vector if options else None)
    rest = (torch.ones(B, J, dtype=torch.bool) if options else None, *plain._replace(**options))
    em_update.forward(*tensors, *rest)
    em_update.backward(vector, vector, pair, *tensors, *rest, (True,) * 7)


def signature(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Types, constants, attributes and options of the arguments, as a launch would derive them."""
    import torch

    types: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    for n, parameter in enumerate(kernel.params):
        value = args[n] if n < len(args) else kwargs[parameter.name]
        specialised = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (specialised and value == 1):
            types[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            types[parameter.name] = TYPES[str(value.dtype).removeprefix("torch.")]
            if not parameter.do_not_specialize_on_alignment and value.data_ptr() % 16 == 0:
                known[(n,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            types[parameter.name] = "i32" if value < 2**31 else "i64"
            if specialised and value % 16 == 0:
                known[(n,)] = [["tt.divisibility", 16]]
        else:
            types[parameter.name] = "fp32"
    options = {name: kwargs[name] for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in kwargs}
    return types, constants, known, options


def resources(cubin: bytes) -> dict[str, int]:
    """registers, and stack: bytes of local memory per thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("--dump-resource-usage", cubin))
    assert found is not None
    return {"registers": int(found[1]), "stack": int(found[2])}


def _cuobjdump(what: str, cubin: bytes) -> str:
    import triton

    tool = Path(triton.__path__[0]) / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout


def _compile(capability: int, launched: tuple[Any, tuple[Any, ...], dict[str, Any]], **more: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, known, options = signature(*launched)
    source = ASTSource(launched[0], types, constants, known)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options | more)


def compile_for(capability: int, launched: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> dict[str, Any]:
    kernel, args, kwargs = launched
    named = dict(zip(kernel.arg_names, args, strict=False))
    compiled = _compile(capability, launched)
    ptx, warps, shared = compiled.asm["ptx"], kwargs.get("num_warps", 4), compiled.metadata.shared
    usage = resources(compiled.asm["cubin"])
    # Disassembly takes half a second, and kernels without a loop over input capsules need it only for spills.
    code = functools.cache(lambda: Code(_cuobjdump("-sass", compiled.asm["cubin"])))
    return {
        "kernel": kernel.fn.__name__,
        "capability": capability,
        # The second accumulate of softmax "in", which writes the coupling, has no sums.
        "mode": "coupling" if named.get("partial_ptr", kernel) is None else kwargs.get("MODE", ""),
        "warps": warps,
        "shared": shared,
        "fused": kwargs.get("enable_fp_fusion", False),
        "mma": sorted(set(re.findall(r"(?:wgmma\.mma_async|tcgen05\.mma|mma)\.sync[\w.]*|tcgen05\.mma[\w.]*", ptx))),
        "operations": len(re.findall(r"^ +(?:%|tt\.store|scf\.)", compiled.asm["ttir"], re.M)),
        "narrow_loads": len(re.findall(r"\bld\.global(?!\S*\.v4\.b32)", ptx)),
        "atomics": sorted(set(re.findall(r"\b(?:red|atom)\.[\w.]*", ptx))),
        **usage,
        "spills": triton_listing.spills(code()) if usage["stack"] else 0,
        "resident": triton_listing.resident(capability, usage["registers"], shared, warps),
        **triton_listing.measured(compiled.asm["ttgir"], code, warps, kwargs),
    }


def signatures() -> None:
    """Prints the kernels and signatures that each call would compile."""
    found = [
        sorted({f"{launched[0].fn.__name__} {signature(*launched)}" for launched in record(call)})
        for call in json.load(sys.stdin)
    ]
    json.dump(found, sys.stdout)


class Driver:
    """Answers what Triton asks a driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def first_call() -> None:
    """Prints seconds and kernels of a layer's first forward and backward, then of another batch, without the launches.

    Takes Triton's own path with an empty cache: Triton binds and specialises the arguments and compiles for sm_90.
    """
    import torch
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tests.support.problems import Case, make, run

    launch, seconds = JITFunction.run, [0.0]
    layer = tuple(map(int, sys.argv[2:])) or (10, 16, 8)

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        start = time.perf_counter()
        launch(self, *args, grid=grid, warmup=True, **kwargs)
        seconds[0] += time.perf_counter() - start

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        driver.set_active(Driver())
        JITFunction.run = warm_up
        for B in (32, 7):
            seconds[0] = 0.0
            run(make((B, 64, *layer), Case(coupling=False), dtype=torch.float32), "triton")
            kernels = len(list(Path(cache).rglob("*.cubin"))) - sum(row["kernels"] for row in found)
            found.append({"B": B, "kernels": kernels, "seconds": round(seconds[0], 3)})
    json.dump(found, sys.stdout)


def seconds() -> None:
    """Prints the CPU seconds that Triton and ptxas take for each kernel of each call, for sm_90, without a cache.

    Unlike wall-clock time, CPU seconds do not grow with other processes on the machine.
    """

    def used() -> float:
        return sum(os.times()[:4])

    found, warm = [], False
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for call in json.load(sys.stdin):
            for launched in record(call):
                if not warm:  # the first compilation also loads the compiler
                    _compile(90, launched, num_stages=2)
                    warm = True
                before = used()
                _compile(90, launched)
                found.append(call | {"kernel": launched[0].fn.__name__, "seconds": round(used() - before, 2)})
    json.dump(found, sys.stdout)


def compiled(calls: list[dict[str, Any]], capabilities: Iterable[int]) -> Iterator[dict[str, Any]]:
    """A row for each kernel of each call and capability."""
    made: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # calls share some kernels
    for call in calls:
        seen = set()
        for launched in record(call):
            key = (launched[0].fn.__name__, str(signature(*launched)))
            if key in seen:
                continue
            seen.add(key)
            if key not in made:
                made[key] = [compile_for(capability, launched) for capability in capabilities]
            yield from (call | row for row in made[key])


def main() -> None:
    capabilities = [int(text) for text in sys.argv[1].split(",")]
    json.dump(list(compiled(json.load(sys.stdin), capabilities)), sys.stdout)


def _of_layer(dtype: str, shape: list[int], **more: Any) -> dict[str, Any]:
    return {"op": "dynamic_routing", "dtype": dtype, "shape": shape} | more


def table() -> None:
    """Prints what the passes of a layer execute, and their sum over a forward and a backward."""
    from . import triton_table

    parser = argparse.ArgumentParser(prog="triton_compile table")
    parser.add_argument("--sm", type=int, nargs="+", default=[90])
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--shape", type=int, nargs=5, default=triton_table.SHAPE, help="B I J D K")
    parser.add_argument("--op", default="dynamic_routing")
    parser.add_argument("--case", type=json.loads, default={}, help="options of tests/support/problems.py, as JSON")
    parser.add_argument("--tf32", action="store_true")
    args = parser.parse_args(sys.argv[2:])
    case = args.case if args.op.endswith("_pass") else {"coupling": False, **args.case}
    for dtype in args.dtype:
        call = _of_layer(dtype, args.shape, op=args.op, case=case, tf32=args.tf32)
        rows = [row for row in compiled([call], args.sm) if "instructions" in row]
        print("\n".join(triton_table.lines(rows)))
        for sm in args.sm:
            found = triton_table.passes(rows, dtype, sm)
            if len(found) == len(triton_table.PASSES):
                r = case.get("num_iterations", 3)
                sums = [triton_table.both_ways(found, what, r) for what in ("instructions", "microseconds")]
                print(f"sm_{sm}, forward and backward, r = {r}: {sums[0]:.0f} instructions, {sums[1]:.1f} µs")


def docs() -> None:
    """Writes the table of docs/triton-kernels.md."""
    from . import triton_table

    rows = []
    for dtype, capabilities in triton_table.BUILDS.items():
        rows += compiled([_of_layer(dtype, triton_table.SHAPE, case={"coupling": False})], capabilities)
    triton_table.write(rows)


def amd() -> None:
    """Prints registers, spills and matrix instructions for each kernel of each call and GPU of toolchain.AMD."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    torch.version.hip = "0"  # launch.py chooses the precision of products by this
    rows = []
    for call in json.load(sys.stdin):
        for kernel, *given in {(each[0], str(signature(*each))): each for each in record(call)}.values():
            types, constants, known, options = signature(kernel, *given)
            source = ASTSource(kernel, types, constants, known)
            for gpu in toolchain.AMD:
                code = triton.compile(source, target=GPUTarget("hip", gpu, 64), options=options).asm["amdgcn"]
                registers, spilled = re.findall(r"\.vgpr(?:_spill)?_count:\s*(\d+)", code)[:2]
                found = {"gpu": gpu, "kernel": kernel.fn.__name__, "registers": int(registers)}
                rows.append(call | found | {"spilled": int(spilled), "matrix": code.count("v_mfma")})
    json.dump(rows, sys.stdout)


COMMANDS = {
    "signatures": signatures,
    "seconds": seconds,
    "first-call": first_call,
    "table": table,
    "docs": docs,
    "amd": amd,
}

if __name__ == "__main__":
    from capsfast import toolchain

    os.environ.pop("TRITON_INTERPRET", None)
    # The backend sends calls to Triton as if Triton's interpreter ran; nothing is launched.
    toolchain.interpreting = lambda: True
    COMMANDS.get(sys.argv[1], main)()
