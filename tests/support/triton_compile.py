"""Compiles the Triton kernels of a call for GPUs that this machine may lack, and reports what the compiler made.

Runs as a process of its own: the tests interpret kernels, and Triton chooses to interpret or compile at import.

    python -m tests.support.triton_compile 80,90,100 < calls.json
    python -m tests.support.triton_compile signatures < calls.json
    python -m tests.support.triton_compile amd < calls.json         for toolchain.AMD
    python -m tests.support.triton_compile docs                     writes the table of docs/triton-kernels.md
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Launched = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, arguments, keywords

TYPES = {"float64": "*fp64", "float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "uint8": "*u8"}
# KiB of shared memory, warps and programs of a multiprocessor, by capability.
LIMITS = {80: (164, 64, 32), 86: (100, 48, 16), 89: (100, 48, 24), 90: (228, 64, 32), 100: (228, 64, 32)}
PAGE = Path(__file__).parents[2] / "docs" / "triton-kernels.md"
BEGIN, END = "<!-- triton-table -->", "<!-- /triton-table -->"
COLUMNS = ("warps", "registers", "stack", "shared", "resident", "instructions")
# The layer of the table, and the targets it is compiled for.
SHAPE = [32, 64, 10, 16, 8]
BUILDS = {"float32": (80, 90, 100), "bfloat16": (90,)}


def record(call: Row) -> list[Launched]:
    """The launches of a call's forward and backward, as on a GPU that has programmatic dependent launch.

    The call's "need" lists inputs that need a gradient, "kernels" the names of the kernels to keep. "smallest_k" is the
    K to which products of float32 are padded.
    """
    import torch
    from triton.runtime.jit import JITFunction

    from capsfast.triton import config, plan
    from tests.support.problems import Case, PassCase, make, run

    plan.has_pdl = lambda device: True
    smallest = dict(config.SMALLEST_K)
    if "smallest_k" in call:
        config.SMALLEST_K[4] = call["smallest_k"]
        config.tiles.cache_clear()
        plan.forget()
    launched: list[Launched] = []

    def remember(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launched.append((self, args, kwargs))

    run_before, JITFunction.run = JITFunction.run, remember
    try:
        options, dtype = call.get("case", {}), getattr(torch, call["dtype"])
        if call["op"] == "windows":
            _windows(call["shape"], options, dtype)
            return launched
        if call["op"] == "em_update":
            _update(call["shape"], options)
            return launched
        if call["op"] == "em_routing":
            _routing(call["shape"], options, dtype)
            return [each for each in launched if each[0].fn.__name__ in call["kernels"]]
        case = (PassCase if call["op"].endswith("_pass") else Case)(**options)
        problem = make(call["shape"], case, call["op"], dtype)
        if call.get("tf32"):
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        run(problem, "triton", call.get("need"))
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        JITFunction.run = run_before
        if smallest != config.SMALLEST_K:
            config.SMALLEST_K.update(smallest)
            config.tiles.cache_clear()
            plan.forget()
    return [each for each in launched if each[0].fn.__name__ in call.get("kernels", [each[0].fn.__name__])]


def _update(shape: tuple[int, int, int], options: dict[str, Any]) -> None:
    """Forward and backward of em_update, with every gradient."""
    import torch

    from capsfast.calls.options import EMOptions
    from capsfast.triton import em_update

    B, J, D = shape
    pair, vector = torch.zeros(B, J), torch.zeros(B, J, D)
    plain = EMOptions(1.0, 0.0, False, "variance", 0.0, "sigmoid", 1.0, False)
    tensors = (pair, vector, vector, vector, torch.zeros(J), torch.zeros(J), vector if options else None)
    rest = (torch.ones(B, J, dtype=torch.bool) if options else None, *plain._replace(**options))
    em_update.forward(*tensors, *rest)
    em_update.backward(vector, vector, pair, *tensors, *rest, (True,) * 7)


def _routing(shape: tuple[int, int, int, int, int], options: dict[str, Any], dtype: Any) -> None:
    """Forward and backward of em_routing with every gradient. options: r, and whether there are masks and positions."""
    import torch

    from capsfast.triton import em_routing

    (B, I, J, D, K), S = shape, options.get("spatial", [])
    u, weight = torch.zeros(B, I, K, dtype=dtype), torch.zeros(I, J, D, K, dtype=dtype)
    x = (torch.zeros(B, I, J, D, *S, dtype=dtype), None) if S else (u, weight)
    masked = options.get("masked", False)
    masks = [torch.ones(B, n, *S, dtype=torch.bool) if masked else None for n in (I, J)]
    activation = torch.zeros(B, I, *S) if options.get("activation", True) else None
    tensors = (*x, activation, torch.zeros(J), torch.zeros(J), *masks)
    rates = (1.0,) * options.get("r", 3)
    rest = (J if S else None, rates, 1.0, 0.1, False, "variance", 0.0, "sigmoid", masked, 1, False)
    poses, activations, state = em_routing.forward(*tensors, *rest, True)
    needed = (True, not S, activation is not None, True, True)
    em_routing.backward(poses, activations, *tensors, state, *rest, needed)


def _windows(shape: list[int], options: dict[str, Any], dtype: Any) -> None:
    """Unfolds images [B, types, K, *size], and adds the windows back. options: kernel_size, stride, and last: whether
    the components are the last axis in memory; all others are the defaults of a convolution."""
    import torch

    from capsfast.triton import windows as kernels
    from capsfast.windows import Windows

    samples, types, K, *size = shape
    image = torch.empty(samples, *size, types, K, dtype=dtype).movedim((-2, -1), (1, 2))
    if not options.get("last", False):
        image = image.contiguous()
    of_axes = (options.get(name, 1) for name in ("kernel_size", "stride"))
    kernel_size, stride = ((value,) * len(size) for value in of_axes)
    windows = Windows(tuple(size), kernel_size, stride, (0,) * len(size), (1,) * len(size))
    unfolded = kernels.unfold(image, windows, windows.all_of(samples))
    kernels.fold_into(image, unfolded, windows, windows.all_of(samples))


def signature(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Types, constants, attributes and options of the arguments, as a launch would derive them."""
    import torch

    types: dict[str, str] = {}
    constants: dict[Any, Any] = {}
    known: dict[Any, Any] = {}
    for n, parameter in enumerate(kernel.params):
        value = args[n] if n < len(args) else kwargs.get(parameter.name, parameter.default)
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
    names = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
    options = {name: kwargs[name] for name in names if name in kwargs}
    return types, constants, known, options


def _compile(launched: Launched, backend: str, gpu: Any, lanes: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, known, options = signature(*launched)
    if "PDL" in constants and (backend != "cuda" or gpu < 90):  # see plan.has_pdl()
        constants["PDL"] = options["launch_pdl"] = False
    source = ASTSource(launched[0], types, constants, known)
    return triton.compile(source, target=GPUTarget(backend, gpu, lanes), options=options)


def _read(tool: str, option: str, cubin: bytes) -> str:
    """What a tool of the CUDA toolkit that comes with Triton prints about compiled code."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [Path(triton.__path__[0]) / "backends/nvidia/bin" / tool, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(cubin: bytes) -> dict[str, int]:
    """registers, and stack: bytes of spilled registers; both of one thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _read("cuobjdump", "--dump-resource-usage", cubin))
    assert found is not None
    return {"registers": int(found[1]), "stack": int(found[2])}


def longest_loop(cubin: bytes) -> list[str]:
    """The instructions of the longest loop that has no loop inside, such as the loop over input capsules."""
    code: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for line in _read("nvdisasm", "-c", cubin).splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", line):
            back = re.match(r"BRA\b.*`\((\.L_x_\d+)\)", instruction[1])
            # The code ends with a branch to itself.
            if back and labels.get(back[1], len(code)) < len(code):
                loops.append((labels[back[1]], len(code) + 1))
            code.append(instruction[1])
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    start, end = max(inner, key=lambda loop: loop[1] - loop[0], default=(0, 0))
    return code[start:end]


def loads_in_flight(loop: Sequence[str]) -> int:
    """The most loads of 16 bytes in a loop that have begun while no instruction has yet waited for any of them."""
    begun: dict[str, int] = {}  # by register: the load that fills the register
    most = 0
    for n, instruction in enumerate([*loop, *loop]):
        name, *registers = re.findall(r"^\S+|\bR\d+", instruction)
        read = registers if name.startswith("LDG") else registers[1:]
        arrived = {begun[register] for register in read if register in begun}
        begun = {register: load for register, load in begun.items() if load not in arrived}
        if name.startswith("LDG.E.128"):
            first = int(registers[0][1:])
            begun |= {f"R{first + k}": n for k in range(4)}
        most = max(most, len(set(begun.values())))
    return most


def resident(capability: int, registers: int, shared: int, warps: int) -> int:
    """How many programs a multiprocessor holds. registers: of a thread; shared: bytes of a program."""
    kib, most_warps, programs = LIMITS[capability]
    # A warp gets registers in units of 256, a scheduler has a quarter of all. A program takes 1 KiB more shared memory.
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // 4 // of_warp * 4 // warps
    by_shared = kib * 1024 // (-(-shared // 128) * 128 + 1024)
    return max(1, min(by_registers, by_shared, most_warps // warps, programs))


def sums_in_products(ttgir: str) -> int:
    """Products that add to a sum of a loop in the tensor core, which rounds towards zero."""
    sums = {name for group in re.findall(r"iter_args\((.*?)\) ->", ttgir) for name in re.findall(r"(%\w+) =", group)}
    return sum(name in sums for name in re.findall(r"tt\.dot %[\w#]+, %[\w#]+, (%\w+)", ttgir))


def lanes(ttgir: str) -> dict[str, list[list[int]]]:
    """For every load and store of a tile how many lanes of a warp lie along each axis."""
    layouts = dict(re.findall(r"(#blocked\d*) = .*?threadsPerWarp = (\[[\d, ]+\])", ttgir))
    found = re.findall(r"tt\.(load|store) .*?tensor<\d+x\d+x!tt\.ptr<\w+>, (#blocked\d*)>", ttgir)
    return {kind: [json.loads(layouts[layout]) for name, layout in found if name == kind] for kind in ("load", "store")}


def accesses(cubin: bytes) -> dict[str, int]:
    """How many instructions access global memory, by name."""
    found = re.findall(r"\b(?:LDG|STG)\.E[.\w]*", _read("nvdisasm", "-c", cubin))
    return {name: found.count(name) for name in sorted(set(found))}


def first_access(ptx: str) -> list[str]:
    """Every instruction of programmatic dependent launch, and the first access to global memory, in order."""
    found = re.findall(r"\bgriddepcontrol\.\w+|\b(?:ld|st|cp|red|atom)\.[\w.:]*global", ptx)
    access = next(n for n, each in enumerate(found) if "global" in each)
    return [each for n, each in enumerate(found) if n == access or "global" not in each]


def compile_for(capability: int, launched: Launched) -> Row:
    kernel, args, kwargs = launched
    named = dict(zip(kernel.arg_names, args, strict=False))
    compiled = _compile(launched, "cuda", capability, 32)
    ptx, warps, shared = compiled.asm["ptx"], kwargs.get("num_warps", 4), compiled.metadata.shared
    usage, loop = resources(compiled.asm["cubin"]), longest_loop(compiled.asm["cubin"])
    return {
        "kernel": kernel.fn.__name__,
        "capability": capability,
        # The second accumulate of softmax "in", which writes the coupling, has no sums.
        "mode": "coupling" if named.get("p_partial", kernel) is None else kwargs.get("MODE", ""),
        "warps": warps,
        "shared": shared,
        "instructions": len(loop),
        "loads in flight": loads_in_flight(loop),
        "loads of 4 bytes": sum(bool(re.match(r"LDG\.E(?!\.\d)", instruction)) for instruction in loop),
        "accesses": accesses(compiled.asm["cubin"]),
        "lanes": lanes(compiled.asm["ttgir"]),
        "fused": kwargs.get("enable_fp_fusion", False),
        "mma": sorted(set(re.findall(r"\bmma\.sync[\w.]*", ptx))),
        "sums in products": sums_in_products(compiled.asm["ttgir"]),
        "operations": len(re.findall(r"^ +(?:%|tt\.store|scf\.)", compiled.asm["ttir"], re.M)),
        "early": compiled.metadata.launch_pdl if capability >= 90 else False,
        "waits": first_access(ptx),
        "atomics": sorted(set(re.findall(r"\b(?:red|atom)\.[\w.]*", ptx))),
        "resident": resident(capability, usage["registers"], shared, warps),
        **usage,
    }


def compiled(calls: list[Row], capabilities: Sequence[int]) -> Iterator[Row]:
    """A row for each kernel of each call and capability. For one capability tiles use the shared memory of its GPUs,
    else what every GPU has."""
    from capsfast.triton import launch

    if len(capabilities) == 1:
        launch.shared_memory = lambda device: 1024 * LIMITS[capabilities[0]][0]
    made: dict[tuple[str, ...], list[Row]] = {}  # calls share some kernels
    for call in calls:
        for key, launched in {(each[0].fn.__name__, str(signature(*each))): each for each in record(call)}.items():
            if key not in made:
                made[key] = [compile_for(capability, launched) for capability in capabilities]
            yield from (call | row for row in made[key])


def signatures(calls: list[Row]) -> list[list[str]]:
    """The kernels and signatures that each call would compile."""
    return [sorted({f"{each[0].fn.__name__} {signature(*each)}" for each in record(call)}) for call in calls]


def amd(calls: list[Row]) -> list[Row]:
    """Registers, spills and matrix instructions for each kernel of each call and GPU of toolchain.AMD."""
    import torch

    torch.version.hip = "0"  # launch.py chooses the precision of products by this
    rows = []
    for call in calls:
        for launched in {(each[0], str(signature(*each))): each for each in record(call)}.values():
            for gpu in toolchain.AMD:
                code = _compile(launched, "hip", gpu, 64).asm["amdgcn"]
                registers, spilled = re.findall(r"\.vgpr(?:_spill)?_count:\s*(\d+)", code)[:2]
                found = {"gpu": gpu, "kernel": launched[0].fn.__name__, "registers": int(registers)}
                rows.append(call | found | {"spilled": int(spilled), "matrix": code.count("v_mfma")})
    return rows


def release() -> str:
    import triton

    return f"Triton {'.'.join(triton.__version__.split('.')[:2])}"


def table(rows: Iterable[Row]) -> str:
    """The text of the page between BEGIN and END: the loops over input capsules of the layer, in the order of rows."""
    lines = [BEGIN, f"| {release()} | {' | '.join(COLUMNS)} |", "|---|" + "--:|" * len(COLUMNS)]
    for row in rows:
        name = "uniform" if row["mode"] == "uniform" else row["kernel"].removesuffix("_kernel")
        if name in ("uniform", "accumulate", "accumulate_gradient", "gradient"):
            cells = [f"{row[column]:,}".replace(",", " ") for column in COLUMNS]
            lines.append(f"| {name}, {row['dtype']}, sm_{row['capability']} | {' | '.join(cells)} |")
    return "\n".join([*lines, END])


def page() -> tuple[str, str, str]:
    """The page in three parts: the text before the table, the table, the text after the table."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN), text.index(END) + len(END)
    return text[:begin], text[begin:end], text[end:]


def docs() -> None:
    rows: list[Row] = []
    for dtype, capabilities in BUILDS.items():
        call = {"op": "dynamic_routing", "dtype": dtype, "shape": SHAPE, "case": {"coupling": False}}
        rows += compiled([call], capabilities)
    before, _, after = page()
    PAGE.write_text(before + table(rows) + after, encoding="utf-8")


if __name__ == "__main__":
    from capsfast.environment import toolchain

    os.environ.pop("TRITON_INTERPRET", None)
    # The backend sends calls to Triton as if Triton's interpreter ran; nothing is launched.
    toolchain.interpreting = lambda: True
    if sys.argv[1] == "docs":
        docs()
    else:
        calls, commands = json.load(sys.stdin), {"signatures": signatures, "amd": amd}
        command = commands.get(sys.argv[1])
        found = command(calls) if command else list(compiled(calls, [int(sm) for sm in sys.argv[1].split(",")]))
        json.dump(found, sys.stdout)
