"""Convolutional capsules."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from ..calls.precision import wide_dtype
from ..windows import Box, Windows
from . import _arguments
from ._blocks import Block, Routed, WindowLayer
from .dynamic_routing import fully_connected
from .routed_caps import RoutedCaps, pose_sizes
from .routing.base import Capsules, starting_std
from .routing.names import RoutingChoice
from .routing.unfolded import UnfoldedVotes, folds_by_pass, unfolded
from .routing.votes import PassVotes, RecordedVotes, Votes
from .routing.windows import Windows as WW
from .routing.windows import WindowVotes
from .weights import Weight

Competition = Literal["window", "child"]


class ConvCaps2d(WindowLayer):
    """Convolutional capsules: routes the capsules of each window, with the same weight at every place.

    Each window is a sample of the routing: ``B·H'·W'`` samples with ``I = in_types·kh·kw`` input capsules in the order
    (type, y, x). Votes are not stored; unfolded poses are stored for a block of windows only.

    Parameters: the parameters of ``routing``, a :class:`capsfast.DynamicRouting`, or with another routing or
    ``pose_rows`` a :class:`capsfast.nn.RoutedCaps`.

    Padding adds no capsules: it has no coupling and no votes.

    Args:
        in_types, out_types: capsules at each place, before and after.
        in_dim, out_dim: sizes of a capsule, K and D.
        kernel_size, stride, padding, dilation: of the window; an int or two ints (vertical, horizontal).
        num_iterations: iterations of the routing; None for its default, 3 for dynamic routing. Dynamic routing with one
            iteration is a convolution of the poses, squashed.
        routing: ``"dynamic"``, or another routing as for :class:`capsfast.nn.RoutedCaps`.
        competition: the output capsules over which the coupling coefficients of an input capsule sum to 1.
            ``"window"``: within a window; an input capsule has a softmax in each of its windows. ``"child"``: one
            softmax over all windows of the input capsule (Hinton, Sabour, Frosst 2018), which doubles the passes. A
            softmax over the input capsules, which some routings have, is always within a window.
        start: with ``competition="child"``, the coupling of a pass without scores, the first pass of most routings.
            ``"child"``: 1 / (J · windows of the input capsule). ``"window"``: 1 / J in every window, as in the code of
            Hinton, Sabour, Frosst (2018) and of Ribeiro, Leontidis, Kollias (2020). Learned logits count as scores.
        weight: as for RoutedCaps. :class:`capsfast.nn.Groups` split the types.
        init_std: as in RoutedCaps. By default dynamic routing starts with weighted sums (of equal coupling) about as
            long as the input capsules, with one iteration twice as long. If there are many small output capsules, sums
            start shorter, because iterations lengthen them. In a deep stack ``squash="exp"`` keeps this length, while
            ``"paper"``, which is quadratic for short vectors, lets capsules fade.
        device, dtype: device and dtype of the parameters.
        options: all other options of RoutedCaps, such as shared_weight and pose_rows, and options of the routing.

    Shapes: ``[B, in_types, in_dim, H, W]`` to ``[B, out_types, out_dim, H', W']``. With a routing other than
    ``"dynamic"``, poses and activations ``[B, in_types, H, W]`` (None for 1) to :class:`capsfast.nn.Capsules` of the
    same form.

    Source: Hinton, Sabour, Frosst (2018), section 4, for the windows; Sabour, Frosst, Hinton (2017) for the routing.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    def __init__(
        self,
        in_types: int,
        out_types: int,
        in_dim: int,
        out_dim: int,
        kernel_size: int | Sequence[int] = 3,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        num_iterations: int | None = None,
        *,
        routing: RoutingChoice = "dynamic",
        competition: Competition = "window",
        start: Competition = "child",
        weight: Weight | None = None,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        op = self._op
        groups = getattr(weight, "groups", 1)
        _arguments.divides(op, "in_types", in_types, groups)
        _arguments.divides(op, "out_types", out_types, groups)
        self.in_types, self.out_types, self.in_dim, self.out_dim = in_types, out_types, in_dim, out_dim
        self._hold_window(2, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        if (competition, start) == ("window", "window"):
            raise ValueError(
                f"{op}: start='window' needs competition='child', got competition='window', which starts so anyway; "
                f"leave out start"
            )
        self.competition, self.start = competition, start
        pose_rows = options.get("pose_rows")
        columns = out_dim if pose_rows is None else pose_sizes(op, in_dim, out_dim, pose_rows)[2]
        self.uses_poses_alone = routing == "dynamic"
        in_caps = in_types * self.kernel_size[0] * self.kernel_size[1]
        if init_std is None and routing == "dynamic":
            routed = in_caps // groups
            share: float = routed if options.get("softmax") == "in" else out_types // groups
            if competition == "child" and (start == "child" or options.get("learned_logits")):
                share *= max(1.0, in_caps / in_types / (self.stride[0] * self.stride[1]))  # windows of a capsule
            init_std = starting_std(num_iterations, share, routed * columns, out_dim)
        self.routing = fully_connected(
            in_caps,
            out_types,
            in_dim,
            out_dim,
            routing,
            num_iterations=num_iterations,
            weight=weight,
            init_std=init_std,
            device=device,
            dtype=dtype,
            **options,
        )

    def unfold(self, poses: Tensor) -> Tensor:
        """``[B, in_types, in_dim, H, W]`` to the input capsules of every window, ``u [B·H'·W', I, K]``."""
        self._check(poses)
        return self._unfolded(self._padded(poses))

    def unfold_activation(self, poses: Tensor, activation: Tensor) -> Tensor:
        """``[B, in_types, H, W]`` beside these poses to the activations of every window, ``[B·H'·W', I]``."""
        self._check(poses, activation)
        return self._unfolded(self._padded(activation).unsqueeze(2)).squeeze(2)

    def inside(self, poses: Tensor) -> Tensor | None:
        """Which capsules of the windows are not padding, bool ``[B·H'·W', I]``; None without padding."""
        ones = self._ones(poses)
        return None if ones is None else self._inside(ones, poses.shape[0])

    def _check(self, poses: Tensor, activation: Tensor | None = None) -> None:
        op = self._op
        sizes = {"in_types": self.in_types, "in_dim": self.in_dim}
        _arguments.sized(op, "poses", poses, "[B, in_types, in_dim, H, W]", **sizes)
        self.grid(poses.shape[3:])
        if activation is not None:
            _arguments.activation_of(op, activation, poses, "[B, in_types, H, W]")

    def _padded(self, image: Tensor) -> Tensor:
        y, x = self.padding
        return F.pad(image, (x, x, y, y)) if self.padding != (0, 0) else image

    def _ones(self, poses: Tensor) -> Tensor | None:
        """bool ``[1, 1, H, W]`` of the padded image, False in the padding; None without padding."""
        if self.padding == (0, 0):
            return None
        return self._padded(torch.ones((1, 1, *poses.shape[3:]), dtype=torch.bool, device=poses.device))

    def _inside(self, ones: Tensor, samples: int) -> Tensor:
        return self._windows(ones.unsqueeze(2)).squeeze(2).repeat(samples, self.in_types)

    def _windows(self, image: Tensor) -> Tensor:
        """An image ``[B, types, K, H, W]`` with its padding to the capsules of its windows, ``[B·H'·W', I, K]``."""
        for size, step, gap in zip(self.kernel_size, self.stride, self.dilation, strict=True):
            # Appends the axis of the window, which brings the next axis of the image to -2.
            image = image.unfold(-2, gap * (size - 1) + 1, step)
        image = image[..., :: self.dilation[0], :: self.dilation[1]]  # [B, types, K, H', W', h, w]
        return image.permute(0, 3, 4, 1, 5, 6, 2).flatten(3, 5).flatten(0, 2)

    def _unfolded(self, image: Tensor) -> Tensor:
        """As :meth:`_windows`, with a faster gradient."""
        if not folds_by_pass(image):
            return self._windows(image)
        with torch.no_grad():
            windows = self._windows(image)
        return unfolded(image, windows, partial(self._fold, image.shape))

    def votes(self, poses: Tensor) -> Votes:
        """The votes in every window; they are not stored."""
        self._check(poses)
        padded = self._padded(poses)
        by_pass = self.routing.held.keeps_u and folds_by_pass(padded)
        u = self._windows(padded.detach()) if by_pass else self._unfolded(padded)
        votes = self.routing.votes(u, self.inside(poses))
        if by_pass and isinstance(votes, PassVotes):
            votes = UnfoldedVotes(votes, padded, partial(self._fold, padded.shape))
        return votes if self.competition == "window" else self._competing((poses.shape[3], poses.shape[4]))(votes)

    def _fold(self, shape: Sequence[int], gradient: Tensor) -> Tensor:
        """The gradient of an image of this shape from the gradient of its windows."""
        area, (samples, types, dim, *size) = self.kernel_size, shape
        grid = _arguments.window_grid("", size, area, self.stride, (0, 0), self.dilation)
        windows = gradient.reshape(samples, *grid, types, *area, dim)
        image = windows.new_zeros((samples, *size, types, dim), dtype=wide_dtype(gradient.dtype))
        for y in range(area[0]):
            for x in range(area[1]):
                seen = image
                for axis, at in enumerate((y, x)):
                    seen = _every(seen, 1 + axis, at * self.dilation[axis], grid[axis], self.stride[axis])
                seen.add_(windows[:, :, :, :, y, x])
        return image.permute(0, 3, 4, 1, 2).to(gradient.dtype)

    def _block(self, poses: Tensor, activation: Tensor | None, box: Box) -> Block:
        windows = self.windows(poses.shape[3:])
        leaves = [
            None if image is None else windows.unfold(image.detach(), box).requires_grad_(image.requires_grad)
            for image in (poses, None if activation is None else activation.unsqueeze(2))
        ]

        def add(gradients: Sequence[Tensor | None], sums: Sequence[Tensor | None]) -> None:
            for image, gradient in zip(sums, gradients, strict=True):
                if image is not None and gradient is not None:
                    windows.fold_into(image if image is sums[0] else image.unsqueeze(2), gradient, box)

        return Block((*leaves, self._mask(windows, box, poses)), leaves, add)

    def _mask(self, windows: Windows, box: Box, poses: Tensor) -> Tensor | None:
        """The mask that takes padding out of the routing; None if padding changes nothing."""
        # Padding has votes 0. They add 0 to sums, and a softmax over the outputs has a row of its own for each capsule.
        if self.uses_poses_alone and self.routing.routing.softmax == "out":
            return None
        inside = windows.inside(box, poses.device)
        return None if inside is None else inside.repeat(box[0][1] - box[0][0], self.in_types)

    def _routed(self, box: Box, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        u, activation, mask = inputs
        assert u is not None
        activation = None if activation is None else activation.squeeze(2)
        places = [last - first for first, last in box]
        capsules = self.routing(u, mask=mask) if self.uses_poses_alone else self.routing(u, activation, mask=mask)
        poses = capsules if isinstance(capsules, Tensor) else capsules.poses
        out = poses.unflatten(0, places).permute(0, 3, 4, 1, 2)  # [B, J, D, H', W']
        return (out,) if self.uses_poses_alone else (out, capsules.activations.unflatten(0, places).movedim(-1, 1))

    def _whole(self, poses: Tensor, activation: Tensor | None, grid: Sequence[int]) -> tuple[Tensor, ...]:
        windows = self.windows(poses.shape[3:])
        box = windows.all_of(poses.shape[0])
        at_windows = None if activation is None else self._unfolded(self._padded(activation).unsqueeze(2))
        return self._routed(box, self._unfolded(self._padded(poses)), at_windows, self._mask(windows, box, poses))

    def _competing(self, size: tuple[int, int]) -> Callable[[Votes], Votes]:
        windows = WW(size, self.grid(size), self.kernel_size, self.stride, self.padding, self.dilation)
        return partial(WindowVotes, windows=windows, start=self.start)

    def at_windows(self, size: tuple[int, int]) -> RoutedCaps:
        """``routing`` for the unfolded windows of an image of ``size`` (H, W); if windows compete, a copy of it."""
        if self.competition == "window":
            return self.routing
        layer = copy.copy(self.routing)
        layer.competing = self._competing(size)
        return layer

    def as_connected(
        self, poses: Tensor, activation: Tensor | None = None, **given: Tensor
    ) -> tuple[RoutedCaps, Tensor, dict[str, Tensor]]:
        """A fully connected layer that computes the same, and its arguments: the windows as samples."""
        windows, inside = self.unfold(poses), self.inside(poses)
        if activation is not None:
            given["activation"] = self.unfold_activation(poses, activation)
        if inside is not None:
            given.setdefault("mask", inside)
        return self.at_windows((poses.shape[3], poses.shape[4])), windows, given

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __call__(
            self, poses: Tensor, activation: Tensor | None = ..., *, return_coupling: Literal[False] = ...
        ) -> Routed: ...
        @overload
        def __call__(
            self, poses: Tensor, activation: Tensor | None = ..., *, return_coupling: Literal[True]
        ) -> tuple[Routed, Tensor]: ...
        @overload
        def __call__(
            self, poses: Tensor, activation: Tensor | None = ..., *, return_coupling: bool
        ) -> Routed | tuple[Routed, Tensor]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self, poses: Tensor, activation: Tensor | None = None, *, return_coupling: bool = False
    ) -> Routed | tuple[Routed, Tensor]:
        """With ``return_coupling`` also the coupling of the last pass, ``c [B, H', W', I, out_types / groups]``."""
        op = self._op
        if activation is not None and self.uses_poses_alone:
            raise ValueError(f"{op}: dynamic routing takes no activation; the length of a pose says it")
        if self.competition == "window" and not return_coupling:
            self._check(poses, activation)
            numbers = self.routing.in_caps * self.in_dim
            capsules = self._in_blocks(self.routing.routing, poses, activation, self.grid(poses.shape[3:]), numbers)
            return capsules[0] if self.uses_poses_alone else Capsules(*capsules)
        votes = self.votes(poses)
        recorded = RecordedVotes(votes, last=True)
        at_windows = None if activation is None else self.unfold_activation(poses, activation)
        capsules = self.routing.routing(recorded if return_coupling else votes, at_windows)
        places = (poses.shape[0], *self.grid(poses.shape[3:]))
        out: Any = capsules.poses.unflatten(0, places).permute(0, 3, 4, 1, 2)  # [B, J, D, H', W']
        if not self.uses_poses_alone:
            out = Capsules(out, capsules.activations.unflatten(0, places).movedim(-1, 1))  # [B, J, H', W']
        return (out, recorded.weights[-1].unflatten(0, places)) if return_coupling else out


def _every(value: Tensor, axis: int, first: int, count: int, step: int) -> Tensor:
    """``count`` places of an axis, ``step`` apart. A slice of a whole axis would be none for batched gradients."""
    taken = value.narrow(axis, first, (count - 1) * step + 1)
    return taken if step == 1 else taken.movedim(axis, 0)[::step].movedim(0, axis)
