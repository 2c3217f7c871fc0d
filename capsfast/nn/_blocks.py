"""Routes the windows of an image one block at a time."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from .. import checks
from .._torch import forward_mode
from ..precision import wide_dtype
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

Box = tuple[tuple[int, int], ...]  # the first and the last sample, and windows along each axis
Routed = Tensor | Capsules  # the output capsules; without activations from dynamic routing
Made = Sequence[Any]  # the inputs of a block's routing, tensors and None


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
        """Calls the layer. Lengths are the activations that are missing, and the activations of dynamic routing."""
        if self.uses_poses_alone:
            found = self(poses, **given)
            return Capsules(found, lengths(found, 2))
        return self(poses, lengths(poses, 2) if activation is None else activation, **given)  # type: ignore[no-any-return]

    def _seen(self, axis: int, first: int, last: int) -> tuple[int, int]:
        """The positions that these windows cover, which may lie outside the image."""
        start, stop = (n * self.stride[axis] - self.padding[axis] for n in (first, last - 1))
        return start, stop + self.dilation[axis] * (self.kernel_size[axis] - 1) + 1

    def _made(self, poses: Tensor, activation: Tensor | None, inside: Tensor | None, box: Box) -> Made:
        """The inputs of a box's routing, from the positions that the windows cover, padded with zeros.

        ``inside``, bool ``[1, 1, *spatial]``, is False in the padding; None without padding.
        """
        raise NotImplementedError(f"{type(self).__name__}: a layer of windows overrides _made")

    def _routed(self, box: Box, *made: Tensor | None) -> tuple[Tensor, ...]:
        """The output capsules of a box, with the axes of positions last."""
        raise NotImplementedError(f"{type(self).__name__}: a layer of windows overrides _routed")

    def _whole(self, poses: Tensor, activation: Tensor | None, grid: Sequence[int]) -> tuple[Tensor, ...]:
        """The output capsules of all windows at once."""
        raise NotImplementedError(f"{type(self).__name__}: a layer of windows overrides _whole")

    def _in_blocks(
        self, routing: nn.Module, poses: Tensor, activation: Tensor | None, grid: Sequence[int], numbers: int
    ) -> tuple[Tensor, ...]:
        """The output capsules of all windows. numbers: how many numbers the routing reads for each window."""
        if getattr(routing, "independent", False) and self._divides(poses, activation, *self.parameters()):
            runs = _runs((poses.shape[0], *grid), BLOCK_BYTES // (numbers * poses.itemsize))
            if max(map(len, runs)) > 1:
                return _Blocks(self, poses, activation, runs).routed()
        return self._whole(poses, activation, grid)

    def _divides(self, *tensors: Tensor | None) -> bool:
        """False under a transform or forward-mode differentiation, or if parts have hooks or are parametrized.

        A parametrization may draw random numbers or change a state, such as the vectors of spectral_norm.
        """
        if not all(value is None or checks.is_eager(value) for value in tensors) or forward_mode():
            return False
        parts = (part for part in self.modules() if part is not self)
        changed = any(hooked(each) or is_parametrized(each) for each in parts)
        return not changed and not getattr(self, "_is_replica", False)


def _runs(counts: Sequence[int], places: int) -> list[list[tuple[int, int]]]:
    """Cuts every axis so that a box holds at most ``places`` windows (or one); the last axis is cut last."""
    found: list[list[tuple[int, int]]] = []
    for count in reversed(counts):
        parts = max(1, -(-count // max(1, min(count, places))))
        bounds = [count * n // parts for n in range(parts + 1)]
        found.insert(0, [*itertools.pairwise(bounds)])
        places //= max(1, count)
    return found


class _Cut:
    """The part of an image that the windows of a box cover, and the padding around it."""

    def __init__(self, layer: WindowLayer, size: Sequence[int], box: Box) -> None:
        part, self.padding = [slice(*box[0]), ...], list[int]()
        for axis, (n, windows) in enumerate(zip(size, box[1:], strict=True)):
            start, stop = layer._seen(axis, *windows)
            begin = min(max(start, 0), n)
            end = min(max(stop, begin), n)
            before = min(max(-start, 0), stop - start)
            part.append(slice(begin, end))
            self.padding = [before, stop - start - before - (end - begin), *self.padding]
        self.part: Any = tuple(part)
        self.layer, self.box = layer, box

    def made(self, poses: Tensor, activation: Tensor | None) -> Made:
        """The inputs of the box's routing, from these parts of an image."""
        if not any(self.padding):
            return self.layer._made(poses, activation, None, self.box)
        ones = poses.new_ones((1, 1, *poses.shape[3:]), dtype=torch.bool)
        shown = None if activation is None else F.pad(activation, self.padding)
        return self.layer._made(F.pad(poses, self.padding), shown, F.pad(ones, self.padding), self.box)


class _Blocks:
    """A call of a layer, block by block. The backward makes the inputs of a block's routing again.

    Of the last blocks autograd keeps all other tensors; the others are routed again.
    """

    def __init__(
        self, layer: WindowLayer, poses: Tensor, activation: Tensor | None, runs: list[list[tuple[int, int]]]
    ) -> None:
        self.layer, self.images, self.runs = layer, (poses, activation), runs
        self.dtypes = {f"layer.{name}": each.dtype for name, each in layer.named_parameters()}
        # In this dtype autograd adds up the gradients from all blocks.
        self.parameters = {f"layer.{name}": each.to(wide_dtype(each.dtype)) for name, each in layer.named_parameters()}
        self.versions = self._versions()
        self.differentiated = torch.is_grad_enabled() and any(
            each is not None and each.requires_grad for each in (*self.images, *self.parameters.values())
        )
        device = poses.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        self.nbytes = 0  # that autograd keeps of a block
        self.allowed = max(GROWTH * poses.nbytes, LEAST_GROWTH) - AT_ONCE * BLOCK_BYTES
        self.cuts = {box: _Cut(layer, poses.shape[3:], box) for box in itertools.product(*runs)}
        self.left = len(self.cuts)
        self.again: tuple[Box, Made] = (), ()  # the tensors of the block whose backward runs, made again
        self.parts: dict[Box, list[Tensor | None]] = {}
        self.totals: list[list[Tensor]] = [[], []]  # the gradients of the images so far
        self.wholes = [
            image if image is None else _Image.apply(image, total)
            for image, total in zip(self.images, self.totals, strict=True)
        ]

    def routed(self, box: Box = ()) -> tuple[Tensor, ...]:
        """The output capsules of all blocks whose first runs are ``box``."""
        given = len(box)
        if given == len(self.runs):
            return self._block(box)
        found = [self.routed((*box, run)) for run in self.runs[given]]
        return tuple(torch.cat(each, given - len(self.runs) if given else 0) for each in zip(*found, strict=True))

    def _block(self, box: Box) -> tuple[Tensor, ...]:
        # Autograd runs the newest node first: a part that is made with its block gets its gradient with it.
        self.parts[box] = [
            image if image is None else _Part.apply(image, self.cuts[box].part, total)
            for image, total in zip(self.wholes, self.totals, strict=True)
        ]
        if not self.differentiated:
            return self._once(box)
        # The backward begins with the last blocks, so their tensors are kept: they make room for its own.
        self.left -= 1
        kept = self.left * self.nbytes <= self.allowed
        self.nbytes = 0 if kept else self.nbytes
        made = self._made(box) if kept else ()
        own = {each.untyped_storage().data_ptr(): n for n, each in enumerate(made) if each is not None}
        counted = {each.untyped_storage().data_ptr() for each in self.parameters.values()}
        places = itertools.count()

        def pack(value: Tensor) -> Any:
            if not kept:
                return (next(places),)
            storage = value.untyped_storage()
            if storage.data_ptr() in own:
                return own[storage.data_ptr()], value.shape, value.stride(), value.storage_offset()
            if storage.data_ptr() not in counted:
                counted.add(storage.data_ptr())
                self.nbytes += storage.nbytes()
            return value.detach()

        def unpack(packed: Any) -> Tensor:
            if self._versions() != self.versions:  # torch checks only the tensors that it keeps itself
                raise RuntimeError(f"{self.layer._op}: inputs and parameters must not change before the backward")
            if isinstance(packed, Tensor):
                return packed
            if self.again[0] != box:
                self.again = box, self._made_again(box) if kept else self._saved_again(box)
            n, *layout = packed
            found = self.again[1][n]
            return found.as_strided(*layout) if layout else found  # type: ignore[no-any-return]

        with saved_tensors_hooks(pack, unpack):
            return self._call(self.layer._routed, box, *made) if kept else self._once(box)  # type: ignore[no-any-return]

    def _made_again(self, box: Box) -> Made:
        with torch.no_grad():
            return self._made(box)

    def _saved_again(self, box: Box) -> Made:
        """All tensors that autograd saves for a block, in their order."""
        saved: list[Tensor] = []
        with torch.enable_grad(), saved_tensors_hooks(lambda value: saved.append(value.detach()), lambda _: _):
            self._once(box)
        return saved

    def _versions(self) -> list[int]:
        return [each._version for each in (*self.images, *self.parameters.values()) if each is not None]

    def _once(self, box: Box) -> tuple[Tensor, ...]:
        return self._call(self.layer._routed, box, *self._made(box))  # type: ignore[no-any-return]

    def _made(self, box: Box) -> Made:
        return self._call(self.cuts[box].made, *self.parts[box])  # type: ignore[no-any-return]

    def _call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function with the parameters of the forward, which functional_call may have removed since then.

        Without autocast's cache, which would return casts that were made without a gradient.
        """
        named = {name: each.to(self.dtypes[name]) for name, each in self.parameters.items()}
        with torch.autocast(*self.autocast, cache_enabled=False):
            return torch.func.functional_call(_Caller(self.layer), named, (function, *args))


class _Caller(nn.Module):
    """Calls a function while functional_call replaces the parameters of the layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class _Image(torch.autograd.Function):
    """An image whose gradient is the sum in ``total``, a list to which the parts add theirs."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, total: list[Tensor]) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return image.view_as(image)

    @staticmethod
    def backward(ctx: Any, nothing: None) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.total.pop(), None


class _Part(torch.autograd.Function):
    """A part of an :class:`_Image`. Autograd's own gradient of a part would be as large as the image."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, place: Any, total: list[Tensor]) -> Tensor:
        ctx.size, ctx.place, ctx.total = image.shape, place, total
        return image[place]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        if not ctx.total:
            ctx.total.append(gradient.new_zeros(ctx.size))
        ctx.total[0][ctx.place].add_(gradient)
        return None, None, None
