"""Routes the windows of an image one block at a time."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from ..calls import checks, replay
from ..calls.precision import wide_dtype
from ..calls.windows import Box, clipped
from ..environment.private_torch import any_global_hook, forward_level, gradients_in_batches
from . import _arguments
from ._layer import Layer, hooked
from .routing.base import Capsules, lengths


class Limits(NamedTuple):
    """Bytes that routing in blocks may take.

    block: the inputs of the routing of a block, unfolded poses or the votes of a convolution.
    growth: of a call, beyond inputs, outputs and gradients; but a call may take as many bytes as its poses. Within this
        limit blocks keep the results of their ops for the backward; the backward routes the other blocks again.
    """

    block: int
    growth: int


# On the CPU a block should stay in the caches, but all threads need windows: a block has so many bytes for each thread,
# within these bounds.
OF_A_THREAD, LEAST_BLOCK, MOST_BLOCK = 2**19, 2**21, 2**24
# On a GPU a block should take longer than the host takes to launch it.
BLOCK_ON_GPU = 2**25
# Memory of one block at work, and of a call, in units of the inputs of a block's routing.
AT_ONCE, GROWTH = 9, 16
# For _boxes(): the rows that a box should have; the most cuts of the last axis beyond those that it needs, and how
# full a box is that needs no more.
ROWS, MOST_CUTS, GOOD = 4, 8, 0.9

Routed = Tensor | Capsules  # the output capsules; from dynamic routing the poses alone
RoutingInputs = Sequence[Any]  # the inputs of a block's routing, tensors and None


class Block(NamedTuple):
    """What the routing of a box of windows takes.

    inputs: of the routing. leaves: the tensors that they are made from, or the inputs themselves; None if there is no
    activation. add: takes the gradients of the leaves, and sums for the gradients of the images, to which it adds.
    """

    inputs: RoutingInputs
    leaves: Sequence[Tensor | None]
    add: Callable[[Sequence[Tensor | None], Sequence[Tensor | None]], None]


def limits(images: Tensor) -> Limits:
    """The limits of calls on the device of the images."""
    block = BLOCK_ON_GPU
    if images.device.type == "cpu":
        block = min(max(LEAST_BLOCK, OF_A_THREAD * torch.get_num_threads()), MOST_BLOCK)
    return Limits(block, GROWTH * block)


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

    def _block(self, poses: Tensor, activation: Tensor | None, box: Box) -> Block:
        """This implementation leaves the gradients of :meth:`_routing_inputs` to autograd."""
        cut = _Cut(self, poses.shape[3:], box)
        parts = [
            None if image is None else _of(image, cut.part).detach().requires_grad_(image.requires_grad)
            for image in (poses, activation)
        ]

        def add(gradients: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> None:
            for image, gradient in zip(sums, gradients, strict=True):
                if image is not None and gradient is not None:
                    _of(image, cut.part).add_(gradient)

        return Block(cut.inputs(*parts), parts, add)  # type: ignore[arg-type]

    def _routing_inputs(
        self, poses: Tensor, activation: Tensor | None, inside: Tensor | None, box: Box
    ) -> RoutingInputs:
        """The inputs of a box's routing, from the positions that the windows cover, padded with zeros.

        ``inside``, bool ``[1, 1, *spatial]``, is False in the padding; None without padding.
        """
        raise NotImplementedError(f"{type(self).__name__}: a layer of windows overrides _block or _routing_inputs")

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
            boxes = _boxes((poses.shape[0], *grid), limits(poses).block // (numbers * poses.itemsize))
            if len(boxes) > 1:
                job = _Job(self, [*named], grid, boxes)
                return _InBlocks.apply(job, poses, activation, *named.values())  # type: ignore[no-any-return]
        return self._whole(poses, activation, grid)

    def _divides(self, *tensors: Tensor | None) -> bool:
        """Whether windows may be routed in blocks: not in a transform, with forward mode, hooks or parametrizations.

        A parametrization may draw random numbers or change a state, such as the vectors of spectral_norm.
        """
        if not checks.is_eager(*tensors) or forward_level() >= 0 or any_global_hook():
            return False
        parts = (part for part in self.modules() if part is not self)
        changed = any(hooked(part) or is_parametrized(part) for part in parts)
        return not changed and not getattr(self, "_is_replica", False)


def _boxes(counts: Sequence[int], places: int) -> list[Box]:
    """Boxes that cover all windows, each with at most ``places`` windows (or one).

    The last axis is cut last: neighbours along it are neighbours in memory. But it is cut where boxes would otherwise
    hold far fewer windows, as with rows that are a little longer than half of ``places``; and where they would have
    fewer than ROWS rows, because windows of neighbouring boxes overlap.
    """
    if not all(counts):
        return [tuple((0, count) for count in counts)]
    places = max(1, places)
    cuts = []
    for axis, count in enumerate(reversed(counts)):
        parts = -(-count // places)
        if axis == 0:
            if len(counts) > 2:
                parts = max(parts, -(-count // max(1, places // ROWS)))
            parts = max(range(parts, parts + MOST_CUTS), key=partial(_filled, count, places))
        size = -(-count // parts)
        # Equal boxes but for the last: memory that one box has freed then fits the next.
        cuts.append([(start, min(start + size, count)) for start in range(0, count, size)])
        places = max(1, places // size)
    return [*itertools.product(*reversed(cuts))]


def _filled(count: int, places: int, parts: int) -> float:
    """The share of ``places`` that boxes fill if an axis is cut into ``parts``; above GOOD, fewer parts are better."""
    size = -(-count // parts)
    return min(places // size * size / places, GOOD) - 1e-6 * parts


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
            begin, end, *around = clipped(*layer._seen(axis, *windows), n)
            part.append((begin, end))
            self.padding = [*around, *self.padding]
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
        outputs, memory = job.forward(tensors)
        ctx.save_for_backward(memory, *tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        memory, *tensors = ctx.saved_tensors
        in_blocks = not torch.is_grad_enabled() and checks.is_eager(*upstream)
        if in_blocks and not any(map(gradients_in_batches, upstream)):
            return None, *ctx.job.backward(memory, _apart(tensors, ctx.needs_input_grad[1:]), upstream)
        return None, *ctx.job.backward_of_all(tensors, upstream)


def _apart(tensors: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """The tensors as leaves of their own: the hooks of a parameter must see its whole gradient."""
    return [
        tensor if tensor is None else tensor.detach().requires_grad_(need)
        for tensor, need in zip(tensors, needs, strict=True)
    ]


class _Job:
    """A call of a layer: the state that forward and backward over the blocks share."""

    def __init__(self, layer: WindowLayer, names: Sequence[str], grid: Sequence[int], boxes: Sequence[Box]) -> None:
        self.layer, self.names, self.grid, self.boxes = layer, names, grid, boxes
        self.differentiated = torch.is_grad_enabled()
        self.recordings: dict[Box, replay.Recording] = {}

    def forward(self, tensors: Sequence[Any]) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """The output capsules, and the memory of the results that recordings keep."""
        poses, activation, *parameters = tensors
        device = poses.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        return self._called(parameters, self._forward, poses, activation, parameters)  # type: ignore[no-any-return]

    def _forward(
        self, poses: Tensor, activation: Tensor | None, parameters: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        differentiated = self.differentiated and any(map(_differentiated, (poses, activation, *parameters)))
        at_once, growth = limits(poses)
        allowed = max(poses.nbytes, growth) - AT_ONCE * at_once
        records, used = differentiated and allowed > 0, 0
        memory: Tensor | None = None
        whole: list[Tensor] = []
        for box in self.boxes:
            recording = replay.Recording() if records else None
            with torch.set_grad_enabled(differentiated):
                block = self.layer._block(poses, activation, box)
                with replay.of_ops(recording):
                    results = [result.detach() for result in self.layer._routed(box, *block.inputs)]
            del block
            if recording is not None:
                if memory is None:
                    nbytes = min(allowed, len(self.boxes) * recording.nbytes)
                    memory = torch.empty(nbytes, dtype=torch.uint8, device=poses.device)
                records = used + recording.nbytes <= memory.numel()
                if records:
                    used = recording.keep(memory, used)
                    self.recordings[box] = recording
            if not whole:
                whole = [self._empty(poses.shape[0], result) for result in results]
            for all_blocks, of_block in zip(whole, results, strict=True):
                _of(all_blocks, box).copy_(of_block)
            del results, recording
        return tuple(whole), memory

    def _empty(self, samples: int, like: Tensor) -> Tensor:
        """An empty tensor for all blocks, with the memory order of the axes in a block."""
        size = (samples, *like.shape[1 : like.dim() - len(self.grid)], *self.grid)
        order = sorted(range(like.dim()), key=like.stride, reverse=True)
        return torch.empty_permuted(size, order, dtype=like.dtype, device=like.device)

    def _called(self, parameters: Sequence[Tensor], function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function with the parameters of the forward, which functional_call may have removed since then.

        Without autocast's cache, which would return casts that were made without a gradient.
        """
        named = {f"layer.{name}": value for name, value in zip(self.names, parameters, strict=True)}
        with torch.autocast(*self.autocast, cache_enabled=False):
            return torch.func.functional_call(_Caller(self.layer), named, (function, *args))

    def backward_of_all(self, tensors: Any, upstream: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients through the graph of the whole image, for second derivatives and batches of gradients."""
        with torch.enable_grad():
            # Views, because autograd calls the hooks of the tensors themselves later.
            tensors = [tensor if tensor is None else tensor.view_as(tensor) for tensor in tensors]
            poses, activation, *parameters = tensors
            results = self._called(parameters, self.layer._whole, poses, activation, self.grid)
        return _gradients(results, tensors, upstream, create_graph=torch.is_grad_enabled())

    def backward(self, memory: Tensor | None, tensors: Any, upstream: Sequence[Tensor]) -> list[Tensor | None]:
        _, _, *parameters = tensors
        return self._called(parameters, self._backward, memory, tensors, upstream)  # type: ignore[no-any-return]

    def _backward(self, memory: Tensor | None, tensors: Any, upstream: Sequence[Tensor]) -> list[Tensor | None]:
        poses, activation, *parameters = tensors
        sums = [torch.zeros_like(image) if _differentiated(image) else None for image in (poses, activation)]
        of_parameters: list[Any] = [None] * len(parameters)
        for box in self.boxes:
            with torch.enable_grad():
                block = self.layer._block(poses, activation, box)
            results = self._again(box, block.inputs, memory)
            gradients = _gradients(results, [*block.leaves, *parameters], [_of(share, box) for share in upstream])
            del results
            count = len(block.leaves)
            block.add(gradients[:count], sums)
            for n, share in enumerate(gradients[count:]):
                if share is not None:
                    share = share.to(wide_dtype(share.dtype))
                    of_parameters[n] = share if of_parameters[n] is None else of_parameters[n].add_(share)
            del block, gradients
        totals = (
            None if total is None else total.to(parameter.dtype)
            for total, parameter in zip(of_parameters, parameters, strict=True)
        )
        return [*sums, *totals]

    def _again(self, box: Box, inputs: RoutingInputs, memory: Tensor | None) -> tuple[Tensor, ...]:
        """The output capsules of a box, with their graph; by kernels only if the forward has not kept the results."""
        recording = self.recordings.get(box)
        with torch.enable_grad():
            if recording is not None and memory is not None:
                try:
                    with replay.of_ops(replay.Replay(recording, memory)):
                        return self.layer._routed(box, *inputs)
                except replay.DifferentError:  # another backend is in force now, or a parameter was frozen
                    pass
            with replay.of_ops(None):
                return self.layer._routed(box, *inputs)


class _Caller(nn.Module):
    """Calls a function while functional_call replaces the parameters of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _differentiated(value: Any) -> bool:
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
