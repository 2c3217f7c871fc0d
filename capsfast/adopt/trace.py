"""Traces the forward and backward of a layer, to see every operation on its tensors.

Numbers alone can't show that a layer clamps at 1000, because no probe is that large. The trace names the operation. It
also raises an error if Python branches on numbers in a tensor, records every condition on the number of samples, and
says which tensors of the layer reach the output.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..environment.names import NAMESPACE


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations without a threshold: random numbers show their effect. A choice (where) has a threshold only if the
# comparison behind its condition has one. A trailing underscore (in place) is cut off.
SMOOTH = _words(
    """
    abs add addmm alias amax as_strided baddbmm bmm cat clone copy cumsum detach diagonal diagonal_backward div dot
    einsum empty empty_like exp expand fill flip full full_like gather index index_add index_put index_select
    lift_fresh_copy linalg_vector_norm log logsumexp masked_fill matmul max mean mm mul mv neg new_empty
    new_empty_strided new_full new_ones new_zeros norm ones ones_like permute pow prod reciprocal repeat reshape rsqrt
    rsub scalar_tensor select select_backward select_scatter sin slice slice_backward slice_scatter softmax _softmax
    _softmax_backward_data _log_softmax _log_softmax_backward_data split split_with_sizes sqrt square squeeze stack std
    sub sum sym_numel sym_size sym_stride t tanh to transpose unbind unsafe_chunk unsafe_split unsqueeze _unsafe_view
    var view _reshape_alias where zero zeros zeros_like
    """
)
# torch's own backwards use these: a norm of 0 has the gradient 0, and a maximum passes its gradient to one entry.
IN_BACKWARD = _words("eq sgn sign value_selecting_reduction_backward scatter")
# A bound up to TINY of these operations is the eps of a length that may be 0, as in torch.nn.functional.normalize.
WITH_BOUND = _words("clamp clamp_min ge gt le lt maximum")
TINY = 1e-6
RANDOM = _words(
    """
    bernoulli dropout exponential multinomial native_dropout normal normal_functional rand rand_like randint
    randint_like randn randn_like randperm uniform
    """
)
# A condition on the batch must hold for all these numbers of samples.
BATCHES = (2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 64, 100, 127, 128, 129, 256, 1000, 4096)


class BranchError(Exception):
    """Python code of the forward branches on numbers in a tensor."""


class UntraceableError(Exception):
    """torch can't trace the forward. The text says why."""


@dataclass(frozen=True)
class Trace:
    """The findings of a trace.

    Attributes:
        reads: names of the tensors that the outputs or their gradients depend on.
        random: whether the outputs depend on random numbers.
        outside: whether the outputs depend on a tensor that is neither an input nor held under a name.
        thresholds: operations on the layer's numbers whose effect only special values show, such as ``clamp``.
        conditions: conditions on the number of samples, in words; empty if all numbers are treated alike.
        program: all operations in order with their arguments; two traces of one computation have the same program.
        operations: names of the operations without repetitions, so that a loop over samples counts once.
    """

    reads: frozenset[str]
    random: bool
    outside: bool
    thresholds: tuple[str, ...]
    conditions: tuple[str, ...]
    program: tuple[str, ...]
    operations: tuple[str, ...]


def trace(
    run: Callable[[dict[str, Tensor]], list[Tensor]],
    given: dict[str, Tensor],
    numbers: Iterable[str],
    batch: str,
    symbolic: bool = False,
) -> Trace:
    """Traces a forward and the backward of its first output.

    Args:
        run: takes tensors by name and returns the outputs.
        given: tensors by name: inputs and the layer's tensors. Tensors that require a gradient get one.
        numbers: names of the tensors that the layer computes with; the others are masks and indices.
        batch: name of the tensor whose first axis is the batch.
        symbolic: trace with symbols for all sizes, which finds ``conditions``; the forward only, because this is slow.
            No other axis may then have the length of the batch: torch uses one symbol for equal lengths.

    Raises:
        BranchError: the forward branches on numbers in a tensor.
        UntraceableError: torch can't trace the forward.
    """
    names = list(given)
    # The incoming gradient is an input, so that the trace shows the operations on this gradient.
    upstream = torch.ones((), dtype=given[batch].dtype, device=given[batch].device)

    def both(upstream: Tensor, *tensors: Tensor) -> Any:
        with torch.enable_grad():
            leaves = {
                name: tensor.detach().requires_grad_(given[name].requires_grad)
                for name, tensor in zip(names, tensors, strict=True)
            }
            outputs = run(leaves)
            if symbolic:
                return outputs, ()
            wanted = [leave for leave in leaves.values() if leave.requires_grad]
            direction = upstream.expand(outputs[0].shape)
            return outputs, torch.autograd.grad(outputs[0], wanted, direction, allow_unused=True)

    mode: Literal["symbolic", "fake"] = "symbolic" if symbolic else "fake"
    try:
        program = make_fx(both, tracing_mode=mode, _allow_non_fake_inputs=True)(
            upstream, *(tensor.detach() for tensor in given.values())
        )
    except GuardOnDataDependentSymNode as error:
        raise BranchError from error
    except RuntimeError as error:
        if "item()" in str(error) or "data-dependent" in str(error).lower():
            raise BranchError from error
        raise UntraceableError(first_line(error)) from error
    except Exception as error:  # other people's code on tensors without numbers; TorchScript
        raise UntraceableError(first_line(error)) from error
    graph = program.graph
    first, *rest = graph.find_nodes(op="placeholder")
    places = dict(zip(rest, names, strict=True))
    ends: Any = graph.output_node().args[0]
    values, gradients = ends
    forward = _behind(values)
    needed = forward | _behind(gradients)
    data = {first, *(node for node, name in places.items() if name in set(numbers))}
    for node in graph.nodes:
        if any(source in data for source in node.all_input_nodes):
            data.add(node)
    ours = [node for node in graph.nodes if node in needed and isinstance(node.target, OpOverload)]
    thresholds = [_name(node) for node in ours if _has_threshold(node, data, node not in forward)]
    (symbol,) = (node for node, name in places.items() if name == batch)
    return Trace(
        frozenset(name for node, name in places.items() if node in needed),
        any(_name(node) in RANDOM for node in ours),
        any(node in needed and not _is_literal(program, node) for node in graph.find_nodes(op="get_attr")),
        tuple(dict.fromkeys(thresholds)),
        tuple(_conditions(symbol.meta["val"])) if symbolic else (),
        tuple(_program(program, [node for node in graph.nodes if node in needed])),
        tuple(name for name, _ in itertools.groupby(map(_name, ours))),
    )


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _behind(ends: Any) -> set[fx.Node]:
    """All nodes that the ends depend on, and the ends."""
    left = [end for end in ends if isinstance(end, fx.Node)]
    behind: set[fx.Node] = set()
    while left:
        node = left.pop()
        if node not in behind:
            behind.add(node)
            left += node.all_input_nodes
    return behind


def _name(node: fx.Node) -> str:
    """``clamp`` for ``aten::clamp_``; ops of other libraries keep the library's name in front."""
    assert isinstance(node.target, OpOverload)
    library, _, name = node.target._schema.name.partition("::")
    return name.removesuffix("_") if library == "aten" else f"{library}::{name}"


def _program(program: fx.GraphModule, nodes: list[fx.Node]) -> Iterator[str]:
    """The nodes as text. Numbers replace the nodes' names, because operations that nothing needs change the names."""
    numbers = {node: f"%{n}" for n, node in enumerate(nodes)}
    for node in nodes:
        if node.op == "placeholder":
            yield node.name
        else:
            arguments = fx.map_arg((node.args, node.kwargs), lambda source: numbers[source])
            yield f"{node.target}{arguments}"


def _has_threshold(node: fx.Node, data: set[fx.Node], backward: bool) -> bool:
    name = _name(node)
    if not any(source in data for source in node.all_input_nodes) or name.startswith(f"{NAMESPACE}::"):
        return False
    if name == "_to_copy":
        dtype: Any = node.kwargs.get("dtype", torch.float32)
        return not dtype.is_floating_point
    if name == "div" and node.kwargs.get("rounding_mode") is not None:
        return True
    if name in WITH_BOUND:
        bounds = [value for value in node.args[1:] if value is not None]
        return not all(isinstance(bound, (int, float)) and 0 < bound <= TINY for bound in bounds)
    return not (name in SMOOTH or name in RANDOM or (backward and name in IN_BACKWARD))


def _is_literal(program: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node is a literal number such as ``torch.tensor(0.5)``; several numbers may come from an array."""
    copied = all(isinstance(user.target, OpOverload) and _name(user) == "lift_fresh_copy" for user in node.users)
    return copied and getattr(program, str(node.target)).numel() == 1


def _conditions(u: Tensor) -> Iterator[str]:
    """Conditions of the forward on the number of samples that don't hold for every number."""
    size = u.shape[0]
    if not isinstance(size, torch.SymInt) or not size.node.expr.free_symbols:
        yield f"B == {size}"  # Python code turned the size into a plain number
        return
    symbol, shapes = size.node.expr, size.node.shape_env
    hints = getattr(shapes, "backed_var_to_val", None) or shapes.var_to_val
    for guard in shapes.guards:
        if symbol not in guard.expr.free_symbols:
            continue
        others = {other: hints[other] for other in guard.expr.free_symbols - {symbol}}
        asked = guard.expr.subs(others)
        if any(not operator.truth(asked.subs({symbol: number})) for number in BATCHES):
            yield str(asked).replace(str(symbol), "B")
