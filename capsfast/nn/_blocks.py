"""Routes the windows of an image one block at a time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from ..calls import checks
from ..calls.precision import wide_dtype
from ..environment.private_torch import forward_level, gradients_in_batches
from . import _arguments
from ._layer import Layer, hooked
from .routing.base import Capsules, lengths

# The inputs of a block's routing, unfolded poses or the votes of a convolution, take about so many bytes.
BLOCK_BYTES = 8 * 2**20
# Beyond inputs, outputs and gradients, a call may take GROWTH times the bytes of its poses, but at least LEAST_GROWTH.
# Within this limit blocks save tensors for the backward; the backward routes the other blocks again.
GROWTH, LEAST_GROWTH = 3.0, 64 * 2**20
# Memory of one block, in units of the inputs of its routing.
AT_ONCE = 5

Box = tuple[tuple[int, int], ...]  # [start, end) of the samples, then of the windows along each axis
Routed = Tensor | Capsules  # the output capsules; from dynamic routing the poses alone
RoutingInputs = Sequence[Any]  # the inputs of a block's routing, tensors and None


class WindowLayer(Layer):
    """A layer that routes the windows of an image, one block at a time if no window depends on another.

    Then memory never holds all unfolded poses or all votes. The backward makes them again for each block.
    """

    uses_poses_alone: bool  # dynamic routing, whose activations are the lengths of the poses
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def _hold_window(self, axes: int, **window: int | Sequence[int]) -> None:
        """Holds kernel_size, stride, padding and dilation, each with a number for every axis of positions."""
        for name, value in window.items():
            setattr(self, name, _arguments.for_axes(self._op, name, value, axes, least=0 if name == "padding" else 1))

    def grid(self, size: Sequence[int]) -> tuple[int, ...]:
        """The size of the output for an input of ``size``."""
        return _arguments.window_grid(self._op, size, self.kernel_size, self.stride, self.padding, self.dilation)

    def capsules(self, poses: Tensor, activation: Tensor | None = None, **given: Any) -> Capsules:
        """Calls the layer. Lengths of poses are used as missing activations and as activations of dynamic routing."""
        if self.uses_poses_alone:
            poses_out = self(poses, **given)
            return Capsules(poses_out, lengths(poses_out, dim=2))
        return self(poses, lengths(poses, dim=2) if activation is None else activation, **given)  # type: ignore[no-any-return]

    def _seen(self, axis: int, first: int, last: int) -> tuple[int, int]:
        """The positions that these windows cover, which may lie outside the image."""
        start, stop = (n * self.stride[axis] - self.padding[axis] for n in (first, last - 1))
        return start, stop + self.dilation[axis] * (self.kernel_size[axis] - 1) + 1

    def _routing_inputs(
        self, poses: Tensor, activation: Tensor | None, inside: Tensor | None, box: Box
    ) -> RoutingInputs:
        """The inputs of a box's routing, from the positions that the windows cover, padded with zeros.

        ``inside``, bool ``[1, 1, *spatial]``, is False in the padding; None without padding.
        """
        raise NotImplementedError(f"{type(self).__name__}: a layer of windows overrides _routing_inputs")

    def _routed(self, box: Box, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """The output capsules of a box, with the axes of positions last."""
        raise NotImplementedError(f"{type(self).__name__}: a layer of windows overrides _routed")

    def _whole(self, poses: Tensor, activation: Tensor | None, grid: Sequence[int]) -> tuple[Tensor, ...]:
        """The output capsules of all windows at once."""
        raise NotImplementedError(f"{type(self).__name__}: a layer of windows overrides _whole")

    def _in_blocks(
        self, routing: nn.Module, poses: Tensor, activation: Tensor | None, grid: Sequence[int], numbers: int
    ) -> tuple[Tensor, ...]:
        """The output capsules of all windows. numbers: how many numbers the routing reads for each window."""
        named = dict(self.named_parameters())
        if getattr(routing, "independent", False) and self._divides(poses, activation, *named.values()):
            boxes = _boxes((poses.shape[0], *grid), BLOCK_BYTES // (numbers * poses.itemsize))
            if len(boxes) > 1:
                job = _Job(self, [*named], grid, boxes)
                return _InBlocks.apply(job, poses, activation, *named.values())  # type: ignore[no-any-return]
        return self._whole(poses, activation, grid)

    def _divides(self, *tensors: Tensor | None) -> bool:
        """Whether windows may be routed in blocks: not in a transform, with forward mode, hooks or parametrizations.

        A parametrization may draw random numbers or change a state, such as the vectors of spectral_norm.
        """
        if not checks.is_eager(*tensors) or forward_level() >= 0:
            return False
        parts = (part for part in self.modules() if part is not self)
        changed = any(hooked(part) or is_parametrized(part) for part in parts)
        return not changed and not getattr(self, "_is_replica", False)


def _boxes(counts: Sequence[int], places: int) -> list[Box]:
    """Boxes that cover all windows, each with at most ``places`` windows (or one); the last axis is cut last."""
    cuts = []
    for count in reversed(counts):
        parts = max(1, -(-count // max(1, min(count, places))))
        bounds = [count * n // parts for n in range(parts + 1)]
        cuts.append([*itertools.pairwise(bounds)])
        places //= max(1, count)
    return [*itertools.product(*reversed(cuts))]


def _of(image: Tensor, box: Box) -> Tensor:
    """The box of ``[B, ..., *spatial]``."""
    samples, *spatial = (slice(*bounds) for bounds in box)
    at: Any = (samples, ..., *spatial)
    return image[at]


class _Cut:
    """The part of an image that the windows of a box cover, and the padding around it."""

    def __init__(self, layer: WindowLayer, size: Sequence[int], box: Box) -> None:
        part, self.padding = [box[0]], list[int]()
        for axis, (n, windows) in enumerate(zip(size, box[1:], strict=True)):
            start, stop = layer._seen(axis, *windows)
            begin = min(max(start, 0), n)
            end = min(max(stop, begin), n)
            before = min(max(-start, 0), stop - start)
            part.append((begin, end))
            self.padding = [before, stop - start - before - (end - begin), *self.padding]
        self.part = tuple(part)
        self.layer, self.box = layer, box

    def inputs(self, poses: Tensor, activation: Tensor | None) -> RoutingInputs:
        """The inputs of the box's routing, from these parts of an image."""
        if not any(self.padding):
            return self.layer._routing_inputs(poses, activation, None, self.box)
        ones = poses.new_ones((1, 1, *poses.shape[3:]), dtype=torch.bool)
        shown = None if activation is None else F.pad(activation, self.padding)
        return self.layer._routing_inputs(F.pad(poses, self.padding), shown, F.pad(ones, self.padding), self.box)


class _InBlocks(torch.autograd.Function):
    """The output capsules of all windows as a function of poses, activation and parameters."""

    @staticmethod
    def forward(ctx: Any, job: "_Job", *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.job = job
        ctx.save_for_backward(*tensors)
        return job.forward(tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        blocks = not torch.is_grad_enabled() and checks.is_eager(*upstream)
        blocks = blocks and not any(map(gradients_in_batches, upstream))
        gradients = ctx.job.backward if blocks else ctx.job.backward_of_all
        return None, *gradients(ctx.saved_tensors, upstream)


class _Job:
    """A call of a layer: the state that forward and backward over the blocks share."""

    def __init__(self, layer: WindowLayer, names: Sequence[str], grid: Sequence[int], boxes: Sequence[Box]) -> None:
        self.layer, self.names, self.grid, self.boxes = layer, names, grid, boxes
        self.differentiated = torch.is_grad_enabled()
        self.graphs: dict[Box, _Graph] = {}

    def forward(self, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        poses, activation, *parameters = tensors
        device = poses.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        differentiated = self.differentiated and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        allowed = max(GROWTH * poses.nbytes, LEAST_GROWTH) - AT_ONCE * BLOCK_BYTES
        whole: list[Tensor] = []
        for box in self.boxes:
            cut = _Cut(self.layer, poses.shape[3:], box)
            with torch.set_grad_enabled(differentiated):
                # Without gradients a part of a view would not require a gradient, even if the view does.
                parts = [None if value is None else _of(value, cut.part) for value in (poses, activation)]
                inputs = self.call(parameters, cut.inputs, *parts)
                if differentiated:
                    graph = _Graph(self, box, inputs, parameters)
                    found, graph.found, graph.inputs = graph.found, (), ()
                    allowed -= graph.nbytes
                    differentiated = allowed >= 0
                    if differentiated:
                        self.graphs[box] = graph
                    del graph
                else:
                    found = self.call(parameters, self.layer._routed, box, *inputs)
            if not whole:
                whole = [self._empty(poses.shape[0], result) for result in found]
            for all_blocks, block in zip(whole, found, strict=True):
                _of(all_blocks, box).copy_(block.detach())
            del inputs, found
        return tuple(whole)

    def _empty(self, samples: int, like: Tensor) -> Tensor:
        """An empty tensor for all blocks, with the memory order of the axes in a block."""
        size = (samples, *like.shape[1 : like.dim() - len(self.grid)], *self.grid)
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        return torch.empty_permuted(size, order, dtype=like.dtype, device=like.device)

    def call(self, parameters: Sequence[Tensor], function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function with the parameters of the forward, which functional_call may have removed since then.

        Without autocast's cache, which would return casts that were made without a gradient.
        """
        named = {f"layer.{name}": value for name, value in zip(self.names, parameters, strict=True)}
        with torch.autocast(*self.autocast, cache_enabled=False):
            return torch.func.functional_call(_Caller(self.layer), named, (function, *args))

    def backward_of_all(self, tensors: Any, upstream: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients through the graph of the whole image, for second derivatives and batches of gradients."""
        poses, activation, *parameters = tensors
        with torch.enable_grad():
            results = self.call(parameters, self.layer._whole, poses, activation, self.grid)
        return _gradients(results, tensors, upstream, create_graph=torch.is_grad_enabled())

    def backward(self, tensors: Any, upstream: Sequence[Tensor]) -> list[Tensor | None]:
        poses, activation, *parameters = tensors
        images = (poses, activation)
        sums = [torch.zeros_like(image) if _differentiated(image) else None for image in images]
        of_parameters: list[Any] = [None] * len(parameters)
        for box in self.boxes:
            cut = _Cut(self.layer, poses.shape[3:], box)
            parts = [
                None if image is None else _of(image, cut.part).detach().requires_grad_(image.requires_grad)
                for image in images
            ]
            with torch.enable_grad():
                inputs = self.call(parameters, cut.inputs, *parts)
                graph = self.graphs.pop(box, None) or _Graph(self, box, inputs, parameters)
            graph.inputs = inputs
            of_routing = graph.gradients([_of(gradient, box) for gradient in upstream], parameters)
            del graph
            of_inputs, more = of_routing[: len(inputs)], of_routing[len(inputs) :]
            del of_routing
            of_parts = _gradients(inputs, [*parts, *parameters], of_inputs)
            del inputs, of_inputs
            for image, part in zip(sums, of_parts, strict=False):
                if image is not None and part is not None:
                    _of(image, cut.part).add_(part)
            for found in (more, of_parts[2:]):
                for n, tensor in enumerate(found):
                    if tensor is not None:
                        tensor = tensor.to(wide_dtype(tensor.dtype))
                        of_parameters[n] = tensor if of_parameters[n] is None else of_parameters[n].add_(tensor)
        own = (
            None if one is None else one.to(parameter.dtype)
            for one, parameter in zip(of_parameters, parameters, strict=True)
        )
        return [*sums, *own]


class _Caller(nn.Module):
    """Calls a function while functional_call replaces the parameters of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _differentiated(value: Tensor | None) -> bool:
    return value is not None and value.requires_grad


def _gradients(
    outputs: Sequence[Any], inputs: Sequence[Any], upstream: Sequence[Tensor | None], **options: Any
) -> list[Tensor | None]:
    """The gradients of these inputs; None for an input without a gradient."""
    pairs = [
        (found, one) for found, one in zip(outputs, upstream, strict=True) if found is not None and one is not None
    ]
    wanted = [value for value in inputs if _differentiated(value)]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found, given = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(found, wanted, given, allow_unused=True, **options))
    return [next(gradients) if _differentiated(value) else None for value in inputs]


class _Graph:
    """The autograd graph of a block's routing. The inputs of the routing are not saved but made again."""

    def __init__(self, job: _Job, box: Box, inputs: RoutingInputs, parameters: Sequence[Tensor]) -> None:
        self.inputs, self.nbytes = inputs, 0
        own = {tensor.untyped_storage().data_ptr(): n for n, tensor in enumerate(inputs) if tensor is not None}
        counted = {parameter.untyped_storage().data_ptr() for parameter in parameters}

        def pack(value: Tensor) -> Any:
            storage = value.untyped_storage()
            if storage.data_ptr() in own:
                return own[storage.data_ptr()], value.shape, value.stride(), value.storage_offset()
            if storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                self.nbytes += storage.nbytes()
            return value.detach()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            n, *layout = packed
            value: Tensor = self.inputs[n].detach().as_strided(*layout)
            return value

        # Leaves without memory of their own.
        self.leaves = [
            tensor.new_zeros(()).expand_as(tensor).requires_grad_() if _differentiated(tensor) else None
            for tensor in inputs
        ]
        with saved_tensors_hooks(pack, unpack):
            read = [
                tensor if leaf is None else _As.apply(leaf, tensor.detach())
                for leaf, tensor in zip(self.leaves, inputs, strict=True)
            ]
            found = job.call(parameters, job.layer._routed, box, *read)
        self.found: Sequence[Tensor] = [tensor.detach() for tensor in found]
        self.edges = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in found]

    def gradients(self, upstream: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs of the routing, then of the parameters."""
        return _gradients(self.edges, [*self.leaves, *parameters], upstream)


class _As(torch.autograd.Function):
    """Returns ``value``; its gradient becomes the gradient of ``leaf``, which has the same shape."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None
