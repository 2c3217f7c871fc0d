"""Slim convolutional capsules: a convolution makes votes, which are routed from types to types at every position."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calls import checks
from ..calls.options import SOFTMAX
from ..calls.positions import to_samples
from ..calls.windows import Box
from ..functional import route_votes
from ..reference.squash import squash
from . import _arguments
from ._blocks import Routed, RoutingInputs, WindowLayer
from .routing.base import Capsules, starting_std
from .routing.names import RoutingChoice, make_routing, routing_name
from .routing.votes import RecordedVotes, votes_of
from .routing.windows import Everywhere, WindowVotes

# A softmax over the output types of all positions, and a squash over all positions (Rajasegaran et al. 2019).
EVERYWHERE = "everywhere"


class SlimConvCaps2d(WindowLayer):
    """Convolutional capsules whose votes come from a convolution, routed from type to type at every position.

    One kernel makes the votes of all input types. An input type has one vote for its whole window, so it has one
    coupling coefficient for each output type and position. (:class:`ConvCaps2d` has one for each capsule in a window.)
    Votes are stored for one block of positions at a time.

    Parameters: ``conv.weight [out_types·out_dim, in_dim, kh, kw]``, whose channel ``j·out_dim + d`` makes component d
    of the votes for type j; and the parameters of the routing.

    Args:
        in_types, out_types: capsule types before and after, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        kernel_size, stride, padding, dilation: of the convolution; an int, or an int for each axis.
        num_iterations: iterations of the routing; None for its default, 3 for dynamic routing.
        routing: ``"dynamic"``, or another routing as for :class:`capsfast.nn.RoutedCaps`, except routings that need the
            input capsules, such as ``"self"``.
        shared: False: a kernel for each input type, ``conv.weight [I·out_types·out_dim, in_dim, kh, kw]``.
        conv_bias: add a bias to the convolution, ``conv.bias``, and so to every vote.
        init_std: the kernel starts as a normal distribution with this deviation, truncated at two deviations. By
            default, dynamic routing starts with weighted sums (of equal coupling) about as long as the input capsules,
            with one iteration twice as long. If there are many small output capsules, sums start shorter, because
            iterations lengthen them. Other routings start as in a fully connected layer, or with votes as long as the
            input capsules.
        device, dtype: device and dtype of the parameters.
        options: options of the routing. Dynamic routing has learned_logits, bias (``[J, D]``, added to the weighted
            sum), softmax, gradient, leaky, squash, eps and backend, as in :func:`capsfast.route_votes`.
            ``softmax="everywhere"`` is the 3-D routing of DeepCaps: the softmax is over the output types of all
            positions, and the squash shrinks an output type as one vector of all its components at all positions.

    Shapes: ``[B, in_types, in_dim, H, W]`` to ``[B, out_types, out_dim, H', W']``. With a routing other than
    ``"dynamic"``, poses and activations ``[B, in_types, H, W]`` (None for 1) to :class:`capsfast.nn.Capsules` of the
    same form; the activation of a vote is the mean activation in its window.

    Source: LaLonde, Bagci (2018); Rajasegaran et al. (2019), for ``softmax="everywhere"``;
    Nguyen, Hua, Le (2021) for three axes.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    _image = "H, W"  # the axes of positions
    _convolution: Callable[..., nn.Module] = nn.Conv2d
    _spread: Callable[..., Tensor] = staticmethod(F.conv2d)  # the same convolution as a function
    conv: Any

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
        shared: bool = True,
        conv_bias: bool = False,
        init_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        op, axes = self._op, self._image.count(",") + 1
        self.in_types, self.out_types, self.in_dim, self.out_dim = in_types, out_types, in_dim, out_dim
        self.shared, self.conv_bias = shared, conv_bias
        self._hold_window(axes, kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        reached = self._reached()
        self.uses_poses_alone = routing == "dynamic"
        self.everywhere = self.uses_poses_alone and options.get("softmax") == EVERYWHERE
        if self.uses_poses_alone and "softmax" in options:
            checks.choice(op, "softmax", options["softmax"], (*SOFTMAX, EVERYWHERE))
        if self.everywhere:
            del options["softmax"]
        options |= {"num_iterations": num_iterations, **factory_kwargs}
        self.routing = make_routing(op, routing, in_types, out_types, in_dim, out_dim, **options)
        if getattr(self.routing, "needs_inputs", False):
            raise ValueError(
                f"{op}: routing must need only votes, because a convolution makes them, "
                f"got {routing_name(routing)}, which needs the input capsules too; use ConvCaps2d for it"
            )
        std = self.routing.weight_std(round(in_dim * reached), columns=out_dim, alike=reached)
        if self.uses_poses_alone:
            share = in_types if options.get("softmax") == "in" else out_types
            std = starting_std(num_iterations, share, in_types * reached * out_dim, out_dim)
        self.init_std, self._std = init_std, std if init_std is None else init_std
        groups = 1 if shared else in_types
        self.conv = self._convolution(
            groups * in_dim,
            groups * out_types * out_dim,
            self.kernel_size,
            **self._window(),
            groups=groups,
            bias=conv_bias,
            **factory_kwargs,
        )
        self._initialise()

    def _initialise(self) -> None:
        nn.init.trunc_normal_(self.conv.weight, std=self._std, a=-2 * self._std, b=2 * self._std)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)

    def votes(self, poses: Tensor, size: Sequence[int] | None = None) -> Tensor:
        """``[B, in_types, in_dim, *spatial]`` to the votes of the convolution, ``[B, I, J, D, *spatial']``."""
        grid = self._grid_of(poses, size)
        chosen = {} if grid == self.grid(poses.shape[3:]) else {"output_size": grid}
        # In the convolution, types are samples (shared kernel) or groups of channels.
        return self._votes_in(self.conv(self._channels(poses), **chosen), poses.shape[0])

    def _grid_of(self, poses: Tensor, size: Sequence[int] | None) -> tuple[int, ...]:
        sizes = {"in_types": self.in_types, "in_dim": self.in_dim}
        _arguments.sized(self._op, "poses", poses, f"[B, in_types, in_dim, {self._image}]", **sizes)
        least = self.grid(poses.shape[3:])
        if size is None:
            return least
        grid: tuple[int, ...] = checks.plain(tuple(size))
        self._check_size(grid, least)
        return grid

    def _channels(self, poses: Tensor) -> Tensor:
        return poses.flatten(0, 1) if self.shared else poses.flatten(1, 2)

    def _votes_in(self, maps: Tensor, samples: int) -> Tensor:
        I, J, D = self.in_types, self.out_types, self.out_dim
        axes = maps.shape[2:]
        return maps.reshape(samples, I, J, D, *axes)

    def _check_size(self, size: tuple[int, ...], least: tuple[int, ...]) -> None:
        if size != least:
            raise TypeError(f"{self._op}: the size of the output follows from the input, got size={size}")

    def _reached(self) -> float:
        """The number of positions whose capsules contribute to a vote."""
        return float(math.prod(self.kernel_size))

    def _window(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> dict[str, Any]:
        """Arguments of the convolution from a grid ``before`` to a grid ``after``."""
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}

    def _means(self, activation: Tensor, inside: Tensor, **window: Any) -> Tensor:
        """``[B, in_types, *spatial]`` to ``[B, in_types, *spatial']``: the mean activation in the window of a vote.

        Padding does not count. If a window holds only padding, the activation is 0.
        """
        ones = torch.ones((1, 1, *self.kernel_size), dtype=activation.dtype, device=activation.device)
        total, count = (self._spread(maps, ones, **window) for maps in (activation.flatten(0, 1).unsqueeze(1), inside))
        means: Tensor = (total / count.clamp_min(1)).squeeze(1).unflatten(0, activation.shape[:2])
        return means

    if TYPE_CHECKING:

        @overload  # type: ignore[override]
        def __call__(
            self,
            poses: Tensor,
            activation: Tensor | None = ...,
            *,
            size: Sequence[int] | None = ...,
            return_coupling: Literal[False] = ...,
        ) -> Routed: ...
        @overload
        def __call__(
            self,
            poses: Tensor,
            activation: Tensor | None = ...,
            *,
            size: Sequence[int] | None = ...,
            return_coupling: Literal[True],
        ) -> tuple[Routed, Tensor]: ...
        @overload
        def __call__(
            self,
            poses: Tensor,
            activation: Tensor | None = ...,
            *,
            size: Sequence[int] | None = ...,
            return_coupling: bool,
        ) -> Routed | tuple[Routed, Tensor]: ...
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def forward(
        self,
        poses: Tensor,
        activation: Tensor | None = None,
        *,
        size: Sequence[int] | None = None,
        return_coupling: bool = False,
    ) -> Routed | tuple[Routed, Tensor]:
        """With ``return_coupling`` also the coupling of the last pass, ``c [B, I, J, *spatial']``.

        ``size``: size of the output of a transposed layer, at most stride - 1 above the size without it.
        """
        grid = self._grid_of(poses, size)
        if activation is not None:
            if self.uses_poses_alone:
                raise ValueError(f"{self._op}: dynamic routing takes no activation; the length of a pose says it")
            _arguments.activation_of(self._op, activation, poses, f"[B, in_types, {self._image}]")
        # With a softmax over all positions, positions depend on each other; perhaps also with a subclassed convolution.
        convolution: Any = self._convolution
        whole = return_coupling or self.everywhere or type(self.conv).forward is not convolution.forward
        if whole:
            *capsules, coupling = self._all(poses, activation, grid, return_coupling)
        else:
            numbers = self.in_types * self.out_types * self.out_dim
            capsules = [*self._in_blocks(self.routing, poses, activation, grid, numbers)]
        out = capsules[0] if self.uses_poses_alone else Capsules(*capsules)
        return (out, coupling) if return_coupling else out

    def _routing_inputs(
        self, poses: Tensor, activation: Tensor | None, inside: Tensor | None, box: Box
    ) -> RoutingInputs:
        conv, window = self.conv, {"stride": self.stride, "dilation": self.dilation}
        maps = self._spread(self._channels(poses), conv.weight, conv.bias, groups=conv.groups, **window)
        votes = self._cropped(self._votes_in(maps, poses.shape[0]), box)
        if activation is None:
            return votes, None
        there = torch.ones_like(activation[:1, :1]) if inside is None else inside.to(activation.dtype)
        return votes, self._cropped(self._means(activation, there, **window), box)

    def _cropped(self, value: Tensor, box: Box) -> Tensor:
        """Only the windows of the box."""
        return value

    def _routed(self, box: Box, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        votes, activation = inputs
        assert votes is not None
        return self._from_votes(votes, activation, False)[:-1]

    def _whole(self, poses: Tensor, activation: Tensor | None, grid: Sequence[int]) -> tuple[Tensor, ...]:
        return self._all(poses, activation, grid, False)[:-1]

    def _all(
        self, poses: Tensor, activation: Tensor | None, grid: Sequence[int], return_coupling: bool
    ) -> tuple[Any, ...]:
        votes = self.votes(poses, grid)
        if activation is not None:
            inside = torch.ones_like(activation[:1, :1])
            activation = self._means(activation, inside, **self._window(poses.shape[3:], grid))
        return self._from_votes(votes, activation, return_coupling)

    def _from_votes(self, votes: Tensor, activation: Tensor | None, return_coupling: bool) -> tuple[Any, ...]:
        """The output capsules, then their coupling or None."""
        routing: Any = self.routing
        if self.uses_poses_alone and not self.everywhere:
            # Positions stay the last axes; turning them into samples would copy the votes.
            common = {"logits": routing.logits, "bias": routing.bias, "backend": routing.backend}
            routed: Any = route_votes(votes, **routing.options(), **common, return_coupling=return_coupling)
            return routed if return_coupling else (routed, None)
        checked = votes_of(self._op, votes, J=self.out_types, backend=routing.backend)
        if self.everywhere:
            checked = WindowVotes(checked, Everywhere(math.prod(votes.shape[4:])))
        recorded = RecordedVotes(checked, last=True)
        seen = recorded if return_coupling else checked
        if self.everywhere:

            def over_image(s: Tensor) -> Tensor:
                image = checked.restore(s)
                return to_samples(squash(image.flatten(2), 2, routing.eps, routing.squash).view_as(image).flatten(3))

            options = {**routing.options(), "squash": over_image, "logits": routing.logits, "bias": routing.bias}
            out = (checked.restore(seen.agree(**options)),)
        else:
            out = tuple(routing(seen, activation))
        return *out, checked.restore(recorded.weights[-1]) if return_coupling else None

    def extra_repr(self) -> str:
        return super().extra_repr() + (", softmax='everywhere'" if self.everywhere else "")


class SlimConvCaps3d(SlimConvCaps2d):
    """:class:`SlimConvCaps2d` with three axes of positions: ``[B, in_types, in_dim, Z, H, W]``.

    ``conv.weight [out_types·out_dim, in_dim, kz, kh, kw]``; kernel_size, stride and so on are an int or three ints.
    """

    _image = "Z, H, W"
    _convolution = nn.Conv3d
    _spread = staticmethod(F.conv3d)


class SlimConvTransposeCaps2d(SlimConvCaps2d):
    """:class:`SlimConvCaps2d` with a transposed convolution, which enlarges the image by its stride.

    Parameters: ``conv.weight [in_dim, out_types·out_dim, kh, kw]`` (without ``shared``
    ``[I·in_dim, out_types·out_dim, kh, kw]``), and the parameters of the routing.

    Args:
        kernel_size, stride, padding, dilation: as for :class:`torch.nn.ConvTranspose2d`; an int, or an int for each
            axis. The default doubles the size; ``size`` of a call chooses among the sizes of a stride above 1.
        all others, shapes, source, errors: as for SlimConvCaps2d. A position that no capsule reaches has
            votes 0 (or conv_bias) and activation 0.
    """

    _convolution: Callable[..., nn.Module] = nn.ConvTranspose2d
    _spread = staticmethod(F.conv_transpose2d)

    def __init__(
        self,
        in_types: int,
        out_types: int,
        in_dim: int,
        out_dim: int,
        kernel_size: int | Sequence[int] = 4,
        stride: int | Sequence[int] = 2,
        padding: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        num_iterations: int | None = None,
        **options: Any,
    ) -> None:
        window = (kernel_size, stride, padding, dilation)
        super().__init__(in_types, out_types, in_dim, out_dim, *window, num_iterations, **options)

    def grid(self, size: Sequence[int]) -> tuple[int, ...]:
        """The size of the output for an input of ``size``."""
        sizes = zip(size, self.kernel_size, self.stride, self.padding, self.dilation, strict=True)
        grid = tuple((n - 1) * s - 2 * p + d * (k - 1) + 1 for n, k, s, p, d in sizes)
        if min(grid) < 1 or min(size) < 1:
            raise ValueError(
                f"{self._op}: the output must have at least one position, got {' x '.join(map(str, grid))} "
                f"for {' x '.join(map(str, size))}; use a smaller padding"
            )
        return grid

    def _check_size(self, size: tuple[int, ...], least: tuple[int, ...]) -> None:
        if len(size) != len(least) or any(
            not low <= there < low + step for there, low, step in zip(size, least, self.stride, strict=True)
        ):
            raise ValueError(
                f"{self._op}: size must be at least {list(least)} and less than a stride of {self.stride} larger, "
                f"got {checks.shown(size)}"
            )

    def _seen(self, axis: int, first: int, last: int) -> tuple[int, int]:
        step, reach = self.stride[axis], self.dilation[axis] * (self.kernel_size[axis] - 1)
        # One position more, because a gap between the votes of two positions may follow.
        return (first + self.padding[axis] - reach) // step, (last - 1 + self.padding[axis]) // step + 2

    def _cropped(self, value: Tensor, box: Box) -> Tensor:
        for axis, (first, last) in enumerate(box[1:]):
            start = self._seen(axis, first, last)[0] * self.stride[axis] - self.padding[axis]
            value = value.narrow(axis - len(box) + 1, first - start, last - first)
        return value

    def _reached(self) -> float:
        """The mean number of positions whose capsules contribute to a vote."""
        return math.prod(max(1.0, size / step) for size, step in zip(self.kernel_size, self.stride, strict=True))

    def _window(self, before: Sequence[int] = (), after: Sequence[int] = ()) -> dict[str, Any]:
        least = self.grid(before) if before else ()
        more = [there - low for there, low in zip(after, least, strict=True)]
        return {**super()._window(), "output_padding": more or 0}


class SlimConvTransposeCaps3d(SlimConvTransposeCaps2d):
    """:class:`SlimConvTransposeCaps2d` with three axes of positions: ``[B, in_types, in_dim, Z, H, W]``."""

    _image = "Z, H, W"
    _convolution = nn.ConvTranspose3d
    _spread = staticmethod(F.conv_transpose3d)
