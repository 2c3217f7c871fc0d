"""A layer or a function of tensors in a CUDA graph: one launch for its forward, one for its backward."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .calls import checks
from .environment.private_torch import tree_flatten, tree_unflatten

__all__ = ["graphed"]

OP = "capsfast.graphed"
DEVICE = "cuda"  # tests without a GPU take "cpu"
AGAIN = "; capture the layer again with capsfast.graphed"
R = TypeVar("R")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Inputs(torch.autograd.Function):
    """Hands the inputs of a graph on, and copies their gradients out of memory that the next replay overwrites."""

    @staticmethod
    def forward(ctx: Any, calls: list[int], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.calls, ctx.number = calls, calls[0]
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # The capture gave the memory of what its backward reads to the rest of that backward. This runs behind the
        # replay, so after one refusal no other backward is right either.
        if ctx.calls[0] != ctx.number:
            ctx.calls[0] += 1
            raise RuntimeError(
                f"{OP}: a call has one backward, before the next call, got a second backward or a later one, whose "
                f"memory is overwritten; run the backward first, or capture a graph for each call"
            )
        ctx.calls[0] += 1
        return (None, *[gradient if gradient is None else gradient.clone() for gradient in gradients])


def graphed(layer: Callable[..., R], example: Tensor | tuple[Tensor, ...], *, warmup: int = 3) -> Callable[..., R]:
    """Captures a layer, or a function such as a loop of routing passes, in a CUDA graph.

    The host then launches two graphs, one for the forward and one for the backward, instead of every kernel. That pays
    for small batches, where the host takes longer than the GPU. It stands on ``torch.cuda.make_graphed_callables`` and
    refuses what that would compute wrongly without an error. The layer itself does not change, except that its buffers
    belong to the graph too: statistics of a batch norm move at every call in training mode, but not by the capture.

    Args:
        layer: a module, or a function of tensors. Everything that needs a gradient must be an argument or a parameter
            of the module. It must not read numbers on the host (``.item()``), and Python code in it runs only now.
        example: the arguments, one tensor or a tuple, on one CUDA device. Calls must have their shapes and dtypes, and
            gradients for the arguments that require one in the example.
        warmup: runs before the capture.

    Returns:
        A function of the same arguments, with the results of the layer. Call it in the same mode (training, autocast),
        and run the backward of a call before the next call. It has no second derivative.

    Raises:
        TypeError, ValueError: the layer or the example does not fit.
        RuntimeError: there is no CUDA device, or the layer cannot be captured.
    """
    examples = example if isinstance(example, tuple) else (example,)
    _check(layer, examples, warmup)
    state, before = _state(layer), _mode(layer, examples[0].device)
    _check_state(layer, state, examples[0].device)
    static = tuple(value.detach().clone().requires_grad_(value.requires_grad) for value in examples)
    shape: dict[str, Any] = {}

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        shape["leaves"], shape["spec"] = tree_flatten(layer(*values[: len(static)]))
        return tuple(leaf for leaf in shape["leaves"] if isinstance(leaf, Tensor))

    buffers = [value for value in state if not isinstance(value, nn.Parameter)]
    saved = [value.detach().clone() for value in buffers]
    device = torch.cuda.device(examples[0].device)  # torch captures a stream of the current device
    try:
        with torch.enable_grad(), device:
            _check_leaves(flat(*static), (*static, *state))
    finally:
        _restore(buffers, saved)
    try:
        with torch.enable_grad(), device:
            # Parameters and buffers are arguments too, so that the layer stays as it is and gradients reach them.
            graph = torch.cuda.make_graphed_callables(
                flat, (*static, *state), num_warmup_iters=warmup, allow_unused_input=True
            )
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"{OP}: the layer must not wait for the GPU, nor have sizes that depend on numbers in a tensor, got "
            f"{str(error).splitlines()[0]}; call the layer itself, or torch.compile it"
        ) from error
    finally:
        _restore(buffers, saved)
    differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in shape["leaves"]]
    constants = [None if isinstance(leaf, Tensor) else (leaf,) for leaf in shape["leaves"]]
    spec, addresses, calls = shape["spec"], _addresses(state), [0]

    def replay(*args: Tensor) -> Any:
        _check_call(args, static)
        _check_hooks(layer)
        if _mode(layer, static[0].device) != before:
            raise RuntimeError(f"{OP}: training modes and autocast must be those of the capture, got others{AGAIN}")
        if _addresses(_state(layer)) != addresses:
            raise RuntimeError(f"{OP}: the parameters must stay as they are, got others than at the capture{AGAIN}")
        calls[0] += 1
        graph_results: Any = graph(*_Inputs.apply(calls, *args, *state))
        results = iter(graph_results)
        # Copies, because the next call overwrites the results.
        leaves = [
            constant[0] if constant else (next(results) if wanted else next(results).detach()).clone()
            for constant, wanted in zip(constants, differentiable, strict=True)
        ]
        return tree_unflatten(leaves, spec)

    return replay


def _state(layer: object) -> list[Tensor]:
    return [*layer.parameters(), *layer.buffers()] if isinstance(layer, nn.Module) else []


def _restore(buffers: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Gives the buffers, such as statistics of a batch norm, the values from before the capture."""
    with torch.no_grad():
        for value, kept in zip(buffers, saved, strict=True):
            value.copy_(kept)


def _addresses(state: Sequence[Tensor]) -> list[tuple[int, bool]]:
    return [(value.data_ptr(), value.requires_grad) for value in state]


def _mode(layer: object, device: torch.device) -> tuple[object, ...]:
    training = [module.training for module in layer.modules()] if isinstance(layer, nn.Module) else []
    return training, checks.autocast_dtype(device)


def _check(layer: object, examples: tuple[Any, ...], warmup: int) -> None:
    if not callable(layer):
        raise TypeError(f"{OP}: layer must be a module or a function of tensors, got {checks.shown(layer)}")
    checks.integer(OP, "warmup", warmup)
    if not examples:
        raise ValueError(f"{OP}: example must be a tensor or a tuple of tensors, got none; give every argument")
    for value in examples:
        if type(value) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{OP}: example must be a tensor or a tuple of tensors, got {checks.shown(value)} of type "
                f"{type(value).__name__}; fix other arguments with functools.partial"
            )
        checks.dense(OP, "example", value)
    if not torch.cuda.is_available():
        raise RuntimeError(f"{OP}: a CUDA graph needs a CUDA device, got none; call the layer itself")
    for value in examples:
        if value.device.type != DEVICE or value.device != examples[0].device:
            raise ValueError(f"{OP}: example must be on one CUDA device, got a tensor on {value.device}; move it")


def _check_state(layer: object, state: Sequence[Tensor], device: torch.device) -> None:
    if checks.autocast_dtype(device) is not None and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            f"{OP}: autocast must not keep its casts, which a graph would read after they are freed, got its cache "
            f'enabled; capture and call under torch.autocast("cuda", cache_enabled=False)'
        )
    _check_hooks(layer)
    for value in state:
        if value._backward_hooks:
            raise ValueError(
                f"{OP}: a replay would run the hooks of a parameter twice, so parameters must have none, got some on "
                f"{checks.shown(value)}; add them after the capture"
            )
        if value.device != device:
            raise ValueError(f"{OP}: the layer must be on {device}, as the example, got a tensor on {value.device}")


def _check_hooks(layer: object) -> None:
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        if any(getattr(module, kind, None) for kind in HOOKS):
            raise ValueError(
                f"{OP}: a replay runs no hooks, so modules must have none, got some on {type(module).__name__}; "
                f"remove them, or add them to what calls the graph"
            )


def _check_leaves(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Refuses tensors that require a gradient and that the graph would not give one."""
    known = {id(value) for value in inputs}
    seen: set[Any] = {None}
    waiting: list[Any] = [value.grad_fn for value in results]
    while waiting:
        if (node := waiting.pop()) in seen:
            continue
        seen.add(node)
        waiting += [inner for inner, _ in node.next_functions]
        if hasattr(node, "variable") and id(node.variable) not in known:
            raise ValueError(
                f"{OP}: what requires a gradient must be an argument or a parameter of a module, got "
                f"{checks.shown(node.variable)} from elsewhere; pass it as an argument, or detach it"
            )


def _check_call(args: Sequence[object], static: Sequence[Tensor]) -> None:
    if len(args) != len(static):
        raise TypeError(f"{OP}: the graph takes {len(static)} arguments by position, got {len(args)}")
    for n, (value, wanted) in enumerate(zip(args, static, strict=True)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{OP}: argument {n} must be a tensor, got {checks.shown(value)}")
        # torch would broadcast, convert and move it.
        if value.shape != wanted.shape or value.dtype != wanted.dtype or value.device != wanted.device:
            raise ValueError(
                f"{OP}: argument {n} must be {checks.shown(wanted)} on {wanted.device}, as in the example, got "
                f"{checks.shown(value)} on {value.device}; capture a graph for each shape"
            )
        if value.requires_grad and not wanted.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{OP}: argument {n} must not require a gradient, as in the example, got one that does; capture with "
                f"an example that requires one"
            )
