"""Slim convolutional capsules: a convolution makes the votes, and types are routed to types at every position."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checks
from ..functional import route_votes
from . import _arguments
from ._layer import Layer
from .routing.agreement import starting_std
from .routing.names import RoutingChoice, make_routing, routing_name
from .routing.votes import RecordedVotes, votes_of
from .routing.windows import Everywhere, WindowVotes

# A softmax over the output types of all positions (Rajasegaran et al. 2019).
EVERYWHERE = "everywhere"


class _SlimCaps(Layer):
    """What the four layers share: the convolution of all capsule types, and the routing of its votes where they lie."""

    _op: str
    _image: str  # the axes of positions
    _transposed = False
    _convolution: Callable[..., nn.Module]
    _spread: Callable[..., Tensor]  # the same convolution as a function
    conv: Any

    def __init__(
        self,
        in_types: int,
        out_types: int,
        in_dim: int,
        out_dim: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
        num_iterations: int | None,
        output_padding: int | Sequence[int] = 0,
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
        _arguments.integers(op, in_types=in_types, out_types=out_types, in_dim=in_dim, out_dim=out_dim)
        checks.boolean(op, "shared", shared)
        checks.boolean(op, "conv_bias", conv_bias)
        if init_std is not None:
            _arguments.positive(op, "init_std", init_std)
        self.in_types = in_types
        self.out_types = out_types
        self.in_dim = in_dim
        self.out_dim = out_dim
        self.shared = shared
        self.kernel_size = _arguments.for_axes(op, "kernel_size", kernel_size, axes)
        self.stride = _arguments.for_axes(op, "stride", stride, axes)
        self.padding = _arguments.for_axes(op, "padding", padding, axes, least=0)
        self.dilation = _arguments.for_axes(op, "dilation", dilation, axes)
        self.output_padding = _arguments.for_axes(op, "output_padding", output_padding, axes, least=0)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        # Positions whose capsules meet in a vote; of a transposed convolution their mean number.
        reached = 1.0
        for size, step in zip(self.kernel_size, self.stride, strict=True):
            reached *= max(1.0, size / step) if self._transposed else size
        self.uses_poses_alone = routing == "dynamic"
        self.everywhere = self.uses_poses_alone and options.get("softmax") == EVERYWHERE
        if self.everywhere:
            del options["softmax"]
        options |= {"num_iterations": num_iterations, **made}
        self.routing = make_routing(op, routing, in_types, out_types, in_dim, out_dim, **options)
        if getattr(self.routing, "needs_inputs", False):
            raise ValueError(
                f"{op}: routing must make do with votes, which are all that a convolution leaves, "
                f"got {routing_name(routing)}, which looks at the input capsules too; use ConvCaps2d for it"
            )
        std = self.routing.weight_std(round(in_dim * reached))
        if self.uses_poses_alone:
            share = in_types if options.get("softmax") == "in" else out_types
            std = starting_std(num_iterations, share, in_types * reached * out_dim)
        self.init_std = std if init_std is None else init_std
        groups = 1 if shared else in_types
        window: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        if self._transposed:
            window["output_padding"] = self.output_padding
        self.conv = self._convolution(
            groups * in_dim,
            groups * out_types * out_dim,
            self.kernel_size,
            **window,
            groups=groups,
            bias=conv_bias,
            **made,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the kernel anew; its bias to 0."""
        nn.init.trunc_normal_(self.conv.weight, std=self.init_std, a=-2 * self.init_std, b=2 * self.init_std)
        if self.conv.bias is not None:
            nn.init.zeros_(self.conv.bias)

    def grid(self, size: Sequence[int]) -> tuple[int, ...]:
        """The positions after the layer, for so many before it."""
        return _arguments.window_places(self._op, size, self.kernel_size, self.stride, self.padding, self.dilation)

    def votes(self, poses: Tensor) -> Tensor:
        """``[B, in_types, in_dim, *spatial]`` to ``votes [B, I, J, D, *spatial']``, which the convolution made."""
        self._check(poses)
        return self._as_votes(self.conv(self._stacked(poses)), poses.shape[0])

    def _check(self, poses: Tensor) -> None:
        shape = f"[B, in_types, in_dim, {self._image}]"
        _arguments.floats(self._op, "poses", poses, shape)
        if poses.shape[1] != self.in_types or poses.shape[2] != self.in_dim:
            raise ValueError(
                f"{self._op}: poses must be [B, in_types={self.in_types}, in_dim={self.in_dim}, {self._image}], "
                f"got {checks.shape_of(poses)}"
            )
        self.grid(poses.shape[3:])

    def _stacked(self, poses: Tensor) -> Tensor:
        """The input of the convolution: types as samples, or as groups of channels."""
        return poses.flatten(0, 1) if self.shared else poses.flatten(1, 2)

    def _as_votes(self, maps: Tensor, B: int) -> Tensor:
        I, J, D = self.in_types, self.out_types, self.out_dim
        votes: Tensor = maps.unflatten(1, (J, D)).unflatten(0, (B, I)) if self.shared else maps.unflatten(1, (I, J, D))
        return votes

    def activation_at(self, poses: Tensor, activation: Tensor, votes: Tensor) -> Tensor:
        """``[B, in_types, *spatial]`` to ``[B, in_types, *spatial']``: the mean over the positions that a vote is of.

        Positions of the padding do not count. Where a vote is of none, the activation is 0.
        """
        _arguments.floats(self._op, "activation", activation, f"[B, in_types, {self._image}]")
        if activation.shape != (*poses.shape[:2], *poses.shape[3:]):
            raise ValueError(
                f"{self._op}: activation must be [B, in_types, {self._image}] of poses {checks.shape_of(poses)}, "
                f"got {checks.shape_of(activation)}"
            )
        ones = torch.ones((1, 1, *self.kernel_size), dtype=activation.dtype, device=activation.device)
        given: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        if self._transposed:
            given["output_padding"] = self._more(poses.shape[3:], votes.shape[4:])
        maps = activation.flatten(0, 1).unsqueeze(1)
        total, count = (self._spread(each, ones, **given) for each in (maps, torch.ones_like(maps[:1])))
        means: Tensor = (total / count.clamp_min(1)).squeeze(1).unflatten(0, activation.shape[:2])
        return means

    def _more(self, before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """The output_padding that gives this size."""
        least = self.grid(before)
        return tuple(more + there - size for more, there, size in zip(self.output_padding, after, least, strict=True))

    def _route(self, poses: Tensor, activation: Tensor | None, votes: Tensor, return_coupling: bool) -> Any:
        if activation is not None:
            if self.uses_poses_alone:
                raise ValueError(f"{self._op}: dynamic routing takes no activation; the length of a pose says it")
            activation = self.activation_at(poses, activation, votes)
        if self.uses_poses_alone and not self.everywhere:
            # Positions stay where they are; as samples they would be copied.
            own: Any = self.routing
            given = {"logits": own.logits, "bias": own.bias, "backend": own.backend}
            return route_votes(votes, **own.options(), **given, return_coupling=return_coupling)
        made = votes_of(self._op, votes, J=self.out_types, backend=self.routing.backend)
        if self.everywhere:
            made = WindowVotes(made, Everywhere(math.prod(votes.shape[4:])))
        recorded = RecordedVotes(made, detach=False)
        found = self.routing(recorded if return_coupling else made, activation)
        out = found.poses if self.uses_poses_alone else found
        return (out, made.restore(recorded.weights[-1])) if return_coupling else out

    def extra_repr(self) -> str:
        text = f"{self.in_types}, {self.out_types}, {self.in_dim}, {self.out_dim}, kernel_size={self.kernel_size}"
        axes = len(self.kernel_size)
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1)):
            if getattr(self, name) != (default,) * axes:
                text += f", {name}={getattr(self, name)}"
        text += ", softmax='everywhere'" if self.everywhere else ""
        return text if self.shared else f"{text}, shared=False"


class SlimConvCaps2d(_SlimCaps):
    """Capsules whose votes are a convolution, routed from type to type at every position.

    One kernel makes the votes of all input types. A vote is one for the whole window, so an input type has one
    coupling coefficient for each output type and position, where :class:`ConvCaps2d` has one for each capsule of the
    window. The votes ``[B, I, J, D, H', W']`` are in memory once, as the convolution leaves them, and are routed there.

    Parameters: ``conv.weight [out_types·out_dim, in_dim, kh, kw]``, whose channel ``j·out_dim + d`` makes component d
    of the votes for type j, and those of the routing.

    Args:
        in_types, out_types: capsule types before and after, I and J.
        in_dim, out_dim: sizes of a capsule, K and D.
        kernel_size, stride, padding, dilation: of the convolution; an int or one for each axis.
        num_iterations: of the routing; None for its default, 3 for dynamic routing.
        routing: ``"dynamic"``, or another one as for :class:`capsfast.nn.RoutedCaps`; but none
            that looks at the input capsules beside their votes, as ``"self"`` does.
        shared: False for a kernel of each input type, ``conv.weight [I·out_types·out_dim, in_dim, kh, kw]``.
        conv_bias: a bias of the convolution, added to every vote; ``conv.bias``.
        init_std: the kernel starts as a normal distribution of this deviation, cut at two deviations. With dynamic
            routing by default such that the weighted sum of equal coupling starts about as long as the input capsules,
            with one iteration twice as long; with another such that a vote is as long as these.
        device, dtype: of the parameters.
        options: of the routing. Of dynamic routing: learned_logits, bias (``[J, D]``, added to the weighted sum),
            softmax, gradient, leaky, squash, eps and backend as for :func:`capsfast.route_votes`.
            ``softmax="everywhere"`` is over the output types of all positions, the 3-D routing of DeepCaps: the
            coupling of an input type then sums to 1 over the image, so it is smaller by the number of positions.

    Shapes: ``[B, in_types, in_dim, H, W]`` to ``[B, out_types, out_dim, H', W']``. With another routing than the
    dynamic, poses and activations ``[B, in_types, H, W]`` (None for 1) to :class:`capsfast.nn.Capsules` of such shapes;
    the activation of a vote is the mean of those in its window.

    Source: LaLonde, Bagci (2018); Rajasegaran et al. (2019), for ``softmax="everywhere"``;
    Nguyen, Hua, Le (2021) for three axes.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    _op = "capsfast.nn.SlimConvCaps2d"
    _image = "H, W"
    _convolution: Callable[..., nn.Module] = nn.Conv2d
    _spread = staticmethod(F.conv2d)

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
        super().__init__(
            in_types,
            out_types,
            in_dim,
            out_dim,
            kernel_size,
            stride,
            padding,
            dilation,
            num_iterations,
            routing=routing,
            shared=shared,
            conv_bias=conv_bias,
            init_std=init_std,
            device=device,
            dtype=dtype,
            **options,
        )

    def forward(self, poses: Tensor, activation: Tensor | None = None, *, return_coupling: bool = False) -> Any:
        """With ``return_coupling``, for dynamic routing, also the last ``c [B, I, J, *spatial']``."""
        return self._route(poses, activation, self.votes(poses), return_coupling)


class SlimConvCaps3d(SlimConvCaps2d):
    """:class:`SlimConvCaps2d` with three axes of positions: ``[B, in_types, in_dim, Z, H, W]``.

    ``conv.weight [out_types·out_dim, in_dim, kz, kh, kw]``; an argument of the window is an int or three of them.
    """

    _op = "capsfast.nn.SlimConvCaps3d"
    _image = "Z, H, W"
    _convolution = nn.Conv3d
    _spread = staticmethod(F.conv3d)


class SlimConvTransposeCaps2d(_SlimCaps):
    """:class:`SlimConvCaps2d` whose votes are a transposed convolution, which enlarges the image by its stride.

    Parameters: ``conv.weight [in_dim, out_types·out_dim, kh, kw]`` (without ``shared``
    ``[I·in_dim, out_types·out_dim, kh, kw]``), and those of the routing.

    Args:
        kernel_size, stride, padding, output_padding, dilation: as for :class:`torch.nn.ConvTranspose2d`; an int or one
            for each axis. The default doubles the size.
        all others: as for SlimConvCaps2d, as are shapes, source and errors. A position that no capsule reaches has
            votes 0 (or conv_bias) and activation 0.
    """

    _op = "capsfast.nn.SlimConvTransposeCaps2d"
    _image = "H, W"
    _transposed = True
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
        output_padding: int | Sequence[int] = 0,
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
        super().__init__(
            in_types,
            out_types,
            in_dim,
            out_dim,
            kernel_size,
            stride,
            padding,
            dilation,
            num_iterations,
            output_padding,
            routing=routing,
            shared=shared,
            conv_bias=conv_bias,
            init_std=init_std,
            device=device,
            dtype=dtype,
            **options,
        )
        for more, step, gap in zip(self.output_padding, self.stride, self.dilation, strict=True):
            if more >= max(step, gap):
                raise ValueError(
                    f"{self._op}: output_padding must be smaller than stride or dilation, got {self.output_padding} "
                    f"with stride {self.stride} and dilation {self.dilation}"
                )

    def grid(self, size: Sequence[int]) -> tuple[int, ...]:
        """The positions after the layer, for so many before it."""
        sizes = zip(size, self.kernel_size, self.stride, self.padding, self.output_padding, self.dilation, strict=True)
        grid = tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, more, d in sizes)
        if min(grid) < 1 or min(size) < 1:
            raise ValueError(
                f"{self._op}: the output must have at least one position, got {' x '.join(map(str, grid))} "
                f"for {' x '.join(map(str, size))}; use a smaller padding"
            )
        return grid

    def votes(self, poses: Tensor, size: Sequence[int] | None = None) -> Tensor:
        self._check(poses)
        if size is None:
            return super().votes(poses)
        least = [there - more for there, more in zip(self.grid(poses.shape[3:]), self.output_padding, strict=True)]
        given = tuple(size)
        if len(given) != len(least) or any(
            not low <= there < low + step for there, low, step in zip(given, least, self.stride, strict=True)
        ):
            raise ValueError(
                f"{self._op}: size must be at least {least} and less than a stride of {self.stride} larger, "
                f"got {checks.shown(given)}"
            )
        return self._as_votes(self.conv(self._stacked(poses), output_size=list(given)), poses.shape[0])

    def forward(
        self,
        poses: Tensor,
        activation: Tensor | None = None,
        *,
        size: Sequence[int] | None = None,
        return_coupling: bool = False,
    ) -> Any:
        """``size``: of the output, in place of output_padding; less than a stride above what it is without one."""
        return self._route(poses, activation, self.votes(poses, size), return_coupling)


class SlimConvTransposeCaps3d(SlimConvTransposeCaps2d):
    """:class:`SlimConvTransposeCaps2d` with three axes of positions: ``[B, in_types, in_dim, Z, H, W]``."""

    _op = "capsfast.nn.SlimConvTransposeCaps3d"
    _image = "Z, H, W"
    _convolution = nn.ConvTranspose3d
    _spread = staticmethod(F.conv_transpose3d)
