"""Class capsules of an image of capsules."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..calls import checks
from . import _arguments
from .primary_caps import FlattenCaps
from .routed_caps import RoutedCaps
from .routing.names import RoutingChoice
from .weights import FullWeight


class ClassCaps2d(RoutedCaps):
    """Fully connected capsules over an image; all places share a weight (Hinton, Sabour, Frosst 2018, section 4).

    A shared weight can't tell where a capsule is, so the place is added to the vote: coordinate addition. With
    ``pose_rows``, row and column of the place are added to the first two entries of the last column of the vote,
    otherwise to its first two components. They are the centers of H and W equal parts of the unit interval: for two
    parts 1/4 and 3/4.

    Votes are not stored; each call stores the weight once for each input capsule.

    Parameters: ``W [in_types, out_caps, out_dim, in_dim]``; with ``pose_rows`` ``[in_types, out_caps, Q, R]``; and the
    parameters of the routing, in ``routing``.

    Args:
        in_types: input capsules at each place.
        out_caps: number of output capsules, J.
        in_dim, out_dim: sizes of a capsule, K and D.
        size: size of the image, an int or (height, width). The routing has ``in_types·H·W`` input capsules in the
            order (type, y, x).
        coordinates: whether to add places to the votes. Take False with dynamic routing on large images: it adds the
            coordinates of all places up, which alone make every class capsule about 1 long. A pair (offset, scale) sets
            the coordinates: place n of N adds ``scale (n + offset) / N``, and True means (0.5, 1). The code of Ribeiro,
            Leontidis, Kollias (2020) has (1, 0.1), another version of that code (1, 0.01), but in a branch that never
            runs: the code adds 0.1 at every place, as (1e12, 1e-13 N) does.
        routing, pose_rows, init_std, device, dtype, options: as in :class:`RoutedCaps`.

    Shapes: poses ``[B, in_types, in_dim, H, W]`` and activation ``[B, in_types, H, W]``, or both as lists
    ``[B, I, in_dim]`` and ``[B, I]``, to :class:`Capsules`: poses ``[B, out_caps, out_dim]`` and activations
    ``[B, out_caps]``.

    Raises:
        ValueError, TypeError: sizes, options or inputs that do not fit.
    """

    _image = "H, W"  # the axes of positions

    def __init__(
        self,
        in_types: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        size: int | Sequence[int],
        *,
        coordinates: bool | Sequence[float] = True,
        routing: RoutingChoice = "dynamic",
        pose_rows: int | None = None,
        **options: Any,
    ) -> None:
        op = self._op
        axes = self._image.count(",") + 1
        size = _arguments.for_axes(op, "size", size, axes)
        if not isinstance(coordinates, bool):
            if not isinstance(coordinates, (tuple, list)) or len(coordinates) != 2:
                raise TypeError(
                    f"{op}: coordinates must be True, False or a pair (offset, scale), got {checks.shown(coordinates)}"
                )
            for name, number in zip(("offset", "scale"), coordinates, strict=True):
                checks.finite(op, f"{name} of coordinates", number)
        for name in ("weight", "shared_weight", "positions"):
            if name in options:
                raise TypeError(f"{op}: {name} is not an option; all places share the weight of a type")
        super().__init__(
            in_types * math.prod(size),
            out_caps,
            in_dim,
            out_dim,
            routing=routing,
            pose_rows=pose_rows,
            weight=FullWeight(math.prod(size)),
            **options,
        )
        rows = out_dim if pose_rows is None else pose_rows
        if coordinates and rows < axes:
            name, many = "out_dim" if pose_rows is None else "pose_rows", ("two", "three")[axes - 2]
            raise ValueError(
                f"{op}: {name} must be at least {axes} for {many} coordinates, got {rows}; or coordinates=False"
            )
        self.in_types = in_types
        self.size = size
        self.coordinates = coordinates if isinstance(coordinates, bool) else tuple(coordinates)
        self.flatten = FlattenCaps()

    def _product(self, u: Tensor) -> tuple[Tensor, Tensor]:
        # The product adds the coordinates, so that kernels need not know of them. A pose matrix gets one more column,
        # and the weight one more row, (0, ..., 0, 1). A vector gets one more component for every axis.
        (W,) = self._parameters_held()
        return self.held.product(*(self._placed(u, W) if self.coordinates else (u, W)))

    def listed(self, u: Tensor, activation: Tensor | None) -> tuple[Tensor, Tensor | None]:
        axes, sizes = len(self.size), ", ".join(map(str, self.size))
        if isinstance(activation, Tensor) and activation.dim() == 2 + axes:
            wanted = [activation.shape[0], self.in_types, *self.size]
            if list(activation.shape) != wanted:
                raise ValueError(
                    f"{self._op}: activation must be [B, in_types, {self._image}] = {wanted}, "
                    f"got {checks.shape_of(activation)}"
                )
            activation = activation.flatten(1)
        if activation is not None:
            _arguments.floats(self._op, "activation", activation, "[B, I]")
        image = isinstance(u, Tensor) and u.dim() == 3 + axes
        _arguments.floats(self._op, "u", u, f"[B, in_types, in_dim, {self._image}]" if image else "[B, I, K]")
        if image and (u.shape[1], *u.shape[3:]) == (self.in_types, *self.size):
            u = self.flatten(u)
        if u.dim() != 3 or u.shape[1] != self.in_caps or u.shape[2] != self.in_dim:
            raise ValueError(
                f"{self._op}: u must be [B, in_types={self.in_types}, in_dim={self.in_dim}, {sizes}] or the "
                f"list [B, {self.in_caps}, in_dim], got {checks.shape_of(u)}"
            )
        return u, activation

    def _placed(self, u: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Pose and weight, extended so that their product adds the coordinates."""
        offset, scale = (0.5, 1.0) if isinstance(self.coordinates, bool) else self.coordinates
        along = [scale * (torch.arange(n, device=u.device, dtype=u.dtype) + offset) / n for n in self.size]
        axes = len(along)
        place = torch.stack(torch.meshgrid(*along, indexing="ij"), -1).flatten(0, -2).repeat(self.in_types, 1)
        if self.pose_rows is None:  # place [I, axes]
            unit = torch.eye(self.out_dim, device=weight.device, dtype=weight.dtype)[:, :axes]
            u = torch.cat([u, place.expand(u.shape[0], -1, -1)], 2)
            return u, torch.cat([weight, unit.expand(*weight.shape[:2], -1, -1)], 3)
        column = nn.functional.pad(place, (0, self.pose_rows - axes))[..., None]  # [I, P, 1]
        last = torch.eye(weight.shape[3], device=weight.device, dtype=weight.dtype)[-1:]
        u = torch.cat([u, column.expand(u.shape[0], -1, -1, -1)], 3)
        return u, torch.cat([weight, last.expand(*weight.shape[:2], -1, -1)], 2)


class ClassCaps1d(ClassCaps2d):
    """:class:`ClassCaps2d` with one axis of positions: poses ``[B, in_types, in_dim, L]``, one coordinate.

    size is an int or a sequence of one int.
    """

    _image = "L"


class ClassCaps3d(ClassCaps2d):
    """:class:`ClassCaps2d` with three axes of positions: poses ``[B, in_types, in_dim, Z, H, W]``, three coordinates.

    size is an int or three ints. The code of Duarte et al. (2018) adds three coordinates to the votes of a video.
    """

    _image = "Z, H, W"
