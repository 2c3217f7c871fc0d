"""Convolutional capsules."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from ..calls import checks
from ..calls.windows import Box
from ..environment.private_torch import gradients_in_batches
from ..windows import Windows
from . import _arguments
from ._blocks import Block, Routed, WindowLayer
from .dynamic_routing import fully_connected
from .routed_caps import RoutedCaps, pose_sizes
from .routing.base import Capsules, starting_std
from .routing.names import RoutingChoice
from .routing.unfolded import UnfoldedVotes, folds_by_pass, unfolded
from .routing.votes import PassVotes, RecordedVotes, Votes
from .routing.windows import WindowVotes, folded
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

    _image = "H, W"  # the axes of positions

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
        axes = self._image.count(",") + 1
        self._hold_window(axes, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        if (competition, start) == ("window", "window"):
            raise ValueError(
                f"{op}: start='window' needs competition='child', got competition='window', which starts so anyway; "
                f"leave out start"
            )
        self.competition, self.start = competition, start
        pose_rows = options.get("pose_rows")
        columns = out_dim if pose_rows is None else pose_sizes(op, in_dim, out_dim, pose_rows)[2]
        self.uses_poses_alone = routing == "dynamic"
        area = math.prod(self.kernel_size)
        if init_std is None and routing == "dynamic":
            routed = in_types * area // groups
            share: float = routed if options.get("softmax") == "in" else out_types // groups
            if competition == "child" and (start == "child" or options.get("learned_logits")):
                share *= max(1.0, area / math.prod(self.stride))  # windows of a capsule
            init_std = starting_std(num_iterations, share, routed * columns, out_dim)
        self.routing = fully_connected(
            in_types * area,
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

    def _windows_of(self, size: Sequence[int]) -> Windows:
        """The windows of an image of ``size``."""
        self.grid(size)  # refuses an image that is smaller than a window
        return Windows(tuple(size), self.kernel_size, self.stride, self.padding, self.dilation)

    def unfold(self, poses: Tensor) -> Tensor:
        """``[B, in_types, in_dim, H, W]`` to the input capsules of every window, ``u [B·H'·W', I, K]``."""
        return _unfolded(self._windows(poses), poses)

    def unfold_activation(self, poses: Tensor, activation: Tensor) -> Tensor:
        """``[B, in_types, H, W]`` beside these poses to the activations of every window, ``[B·H'·W', I]``."""
        return _unfolded(self._windows(poses, activation), activation.unsqueeze(2)).squeeze(2)

    def inside(self, poses: Tensor) -> Tensor | None:
        """Which capsules of the windows are not padding, bool ``[B·H'·W', I]``; None without padding."""
        inside = self._windows_of(poses.shape[3:]).inside(device=poses.device)
        return None if inside is None else inside.repeat(poses.shape[0], self.in_types)

    def _windows(self, poses: Tensor, activation: Tensor | None = None) -> Windows:
        """The windows of these poses, which are checked."""
        op, sizes = self._op, {"in_types": self.in_types, "in_dim": self.in_dim}
        _arguments.sized(op, "poses", poses, f"[B, in_types, in_dim, {self._image}]", **sizes)
        windows = self._windows_of(poses.shape[3:])
        if activation is not None:
            _arguments.activation_of(op, activation, poses, f"[B, in_types, {self._image}]")
        return windows

    def votes(self, poses: Tensor) -> Votes:
        """The votes in every window; they are not stored."""
        windows = self._windows(poses)
        by_pass = self.routing.held.keeps_u and folds_by_pass(poses)
        u = windows.unfold(poses.detach()) if by_pass else _unfolded(windows, poses)
        votes = self.routing.votes(u, self.inside(poses))
        if by_pass and isinstance(votes, PassVotes):
            votes = UnfoldedVotes(votes, poses, partial(_folded, windows, poses.shape))
        return votes if self.competition == "window" else self._competing(poses.shape[3:])(votes)

    def _block(self, poses: Tensor, activation: Tensor | None, box: Box) -> Block:
        windows = self._windows_of(poses.shape[3:])
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
        capsules = self.routing(u, mask=mask) if self.uses_poses_alone else self.routing(u, activation, mask=mask)
        return self._at_places(capsules, [last - first for first, last in box])

    def _at_places(self, capsules: Tensor | Capsules, places: Sequence[int]) -> tuple[Tensor, ...]:
        """Poses ``[B, J, D, H', W']`` and, unless the poses say them, activations ``[B, J, H', W']``."""
        parts = (capsules,) if isinstance(capsules, Tensor) else capsules[: 1 if self.uses_poses_alone else 2]
        grid = range(1, len(places))
        return tuple(part.unflatten(0, places).movedim([*grid], [-axis for axis in reversed(grid)]) for part in parts)

    def _whole(self, poses: Tensor, activation: Tensor | None, grid: Sequence[int]) -> tuple[Tensor, ...]:
        windows = self._windows_of(poses.shape[3:])
        at_windows = None if activation is None else _unfolded(windows, activation.unsqueeze(2))
        box = windows.all_of(poses.shape[0])
        return self._routed(box, _unfolded(windows, poses), at_windows, self._mask(windows, box, poses))

    def _competing(self, size: Sequence[int]) -> Callable[[Votes], Votes]:
        return partial(WindowVotes, windows=self._windows_of(size), start=self.start)

    def at_windows(self, size: Sequence[int]) -> RoutedCaps:
        """``routing`` for the unfolded windows of an image of ``size``; if windows compete, a copy of it."""
        if self.competition == "window":
            return self.routing
        layer = copy.copy(self.routing)
        layer.competing = self._competing(size)
        return layer

    def as_connected(
        self, poses: Tensor, activation: Tensor | None = None, **given: Tensor
    ) -> tuple[RoutedCaps, Tensor, dict[str, Tensor]]:
        """A fully connected layer that computes the same, and its arguments: the windows as samples."""
        unfolded, inside = self.unfold(poses), self.inside(poses)
        if activation is not None:
            given["activation"] = self.unfold_activation(poses, activation)
        if inside is not None:
            given.setdefault("mask", inside)
        return self.at_windows(poses.shape[3:]), unfolded, given

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
        if activation is not None and self.uses_poses_alone:
            raise ValueError(f"{self._op}: dynamic routing takes no activation; the length of a pose says it")
        grid, coupling = self._windows(poses, activation).grid, None
        if self.competition == "window" and not return_coupling:
            numbers = self.routing.in_caps * self.in_dim
            capsules = self._in_blocks(self.routing.routing, poses, activation, grid, numbers)
        else:
            votes, places = self.votes(poses), (poses.shape[0], *grid)
            recorded = RecordedVotes(votes, last=True)
            at_windows = None if activation is None else self.unfold_activation(poses, activation)
            routed = self.routing.routing(recorded if return_coupling else votes, at_windows)
            capsules = self._at_places(routed, places)
            coupling = recorded.weights[-1].unflatten(0, places) if return_coupling else None
        out = capsules[0] if self.uses_poses_alone else Capsules(*capsules)
        return out if coupling is None else (out, coupling)


class ConvCaps1d(ConvCaps2d):
    """:class:`ConvCaps2d` with one axis of positions: ``[B, in_types, in_dim, L]``.

    kernel_size, stride and so on are an int or a sequence of one int. Input capsules are in the order (type, position).

    Source: Zhao et al. (2018), for text.
    """

    _image = "L"


class ConvCaps3d(ConvCaps2d):
    """:class:`ConvCaps2d` with three axes of positions: ``[B, in_types, in_dim, Z, H, W]``.

    kernel_size, stride and so on are an int or three ints. Input capsules are in the order (type, z, y, x).

    Source: Duarte et al. (2018), for video.
    """

    _image = "Z, H, W"


def _unfolded(windows: Windows, image: Tensor) -> Tensor:
    """:meth:`Windows.unfold`, with a faster gradient."""
    if not folds_by_pass(image):
        return windows.unfold(image)
    return unfolded(image, windows.unfold(image.detach()), partial(_folded, windows, image.shape))


def _folded(windows: Windows, shape: Sequence[int], gradient: Tensor) -> Tensor:
    """The gradient of an image of this shape from the gradient of its windows, whose poses may be matrices."""
    capsules = gradient.reshape(*gradient.shape[:2], shape[2])
    if torch.is_grad_enabled() or not checks.is_eager(gradient) or gradients_in_batches(gradient):
        return folded(windows, capsules)
    image = gradient.new_zeros(shape)
    windows.fold_into(image, capsules, windows.all_of(shape[0]))
    return image
