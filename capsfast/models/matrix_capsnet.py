"""The network of matrix capsules of Hinton, Sabour, Frosst (2018)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..calls import checks
from ..calls.options import Backend
from ..nn import ClassCaps2d, ConvCaps2d, PrimaryMatrixCaps, _arguments
from ..nn.conv_caps import Competition
from ..nn.routing.base import Capsules
from ..nn.routing.em import EMRouting
from ..nn.routing.names import RoutingChoice, routing_class
from ._images import DecodedCapsules

Window = tuple[int, int]  # kernel size and stride, both the same along both axes


def fitting_windows(height: int, width: int) -> tuple[Window, Window, Window]:
    """The paper's windows. Images below 17 pixels get smaller windows with a stride of 1, so that a place remains."""
    side = min(height, width)
    if side >= 17:
        return (5, 2), (3, 2), (3, 1)
    kernel = 3 if side >= 7 else 1
    return (kernel, 1), (kernel, 1), (kernel, 1)


def starting_options(op: str, routing: RoutingChoice, dim: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of EM routing with which three layers of EM routing learn. ``options`` take precedence.

    Poses keep their scale from layer to layer, and the floor is below the variance of their votes. A capsule of mean
    mass, whose votes have a variance as large as the floor, starts with an activation of 1/2; a capsule without mass
    starts with far less. With a beta_a of 0 a capsule without mass would stay near 1/2 for long: an inverse temperature
    far below 1 multiplies beta_a, and optimizer steps that suit weights hardly move beta_a. With a floor of 1 and a
    beta_u of 0 no cost is negative, so evidence would lower an activation.
    """
    if routing_class(op, routing) is not EMRouting:
        return {}
    start: dict[str, Any] = {"identity": True, "init_std": 0.3, "floor": 0.1, "final": 2.0}
    floor = options.get("floor", start["floor"])
    if options.get("cost", "variance") == "variance" and isinstance(floor, (int, float)) and floor > 0:
        start["initial_beta_u"] = -0.5 * math.log(2 * floor)
        if options.get("cost_scale", "mean") == "mean":
            start["initial_beta_a"] = -10.0
            start["initial_beta_u"] -= 10.0 / dim
    return start


class MatrixCapsNet(DecodedCapsules):
    """Convolution, primary capsules with poses and activations, two layers of convolutional capsules and class capsules
    with coordinate addition (Hinton, Sabour, Frosst 2018, figure 1).

    The defaults are the paper's small network for smallNORB, A = 64, B = 8, C = D = 16, with 68 754 parameters. The
    network with A = B = C = D = 32 has 317 194. The paper says 68 thousand and 310 thousand.

    ``form="variational"`` is the network of Ribeiro, Leontidis, Kollias (2020), as in the authors' code, but with
    coordinates (see ``coordinates`` of :class:`capsfast.nn.ClassCaps2d`): 68 714 parameters for smallNORB, 95 572 for
    MNIST with ``primary_types=16``. A batch normalisation follows the convolution,
    the primary capsules and each routing; the convolutions have no bias. W starts with the standard deviation of
    Glorot's initialisation.

    Parts: ``conv``, ``norm`` (in the variational form, else None), ``primary``
    (:class:`capsfast.nn.PrimaryMatrixCaps`), ``conv_caps`` (two :class:`capsfast.nn.ConvCaps2d`), ``routing``
    (:class:`capsfast.nn.ClassCaps2d`). There is no decoder.

    Args:
        in_channels, image_size: channels and size of the images; the size is an int or (height, width).
        num_classes: J.
        form: ``"em"`` or ``"variational"``.
        conv_channels: A, channels of the convolution.
        primary_types: B, capsules at each place.
        activation_std: for the primary capsules, see :class:`capsfast.nn.PrimaryMatrixCaps`.
        conv_types: C and D, capsule types of the two layers of convolutional capsules.
        pose_rows: rows of the pose matrices, which are square.
        num_iterations: iterations of every routing; None for the default of the routing.
        routing: a routing as for :class:`capsfast.nn.RoutedCaps`, by default ``form``. A routing that takes no
            activations gets poses only; the lengths of the poses serve where activations are needed.
        competition: for the convolutional capsules, see :class:`capsfast.nn.ConvCaps2d`; the paper has ``"child"``.
        start: for the convolutional capsules; by default ``"child"``, for ``"variational"`` ``"window"``.
        coordinates: whether class capsules have coordinate addition, or which, see :class:`capsfast.nn.ClassCaps2d`; by
            default True, for ``"variational"`` ``(1, 0.1)``.
        windows: (kernel size, stride) of the convolution and of the two layers of capsules; by default ((5, 2), (3, 2),
            (3, 1)), and smaller windows for images below 17 pixels.
        backend, device, dtype, routing_options: for all routings. Here EM routing starts with ``identity=True``,
            ``init_std=0.3``, ``floor=0.1``, ``final=2``, ``initial_beta_a=-10`` and an ``initial_beta_u`` of
            ``-0.5 log(2 floor) - 10 / pose_rows^2``.

    Shapes: images ``[B, C, H, W]`` with values in [0, 1] to :class:`CapsNetOutput`, whose reconstruction is None.

    Raises:
        ValueError, TypeError: a size, an option or an input that does not fit.
    """

    decoder = None

    def __init__(
        self,
        in_channels: int = 2,
        image_size: int | Sequence[int] = 32,
        num_classes: int = 5,
        *,
        form: Literal["em", "variational"] = "em",
        conv_channels: int = 64,
        primary_types: int = 8,
        activation_std: float | None = None,
        conv_types: Sequence[int] = (16, 16),
        pose_rows: int = 4,
        num_iterations: int | None = None,
        routing: RoutingChoice | None = None,
        competition: Competition = "child",
        start: Competition | None = None,
        coordinates: bool | Sequence[float] | None = None,
        windows: Sequence[Sequence[int]] | None = None,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **routing_options: Any,
    ) -> None:
        super().__init__()
        op = self._op
        size = self._sees(in_channels, image_size)
        normalized = form == "variational"
        if normalized and activation_std is not None:
            raise ValueError(f"{op}: activation_std needs form='em': a norm would undo it; leave it out")
        routing = form if routing is None else routing
        if start is None:
            start = "window" if normalized and competition == "child" else "child"
        if coordinates is None:
            coordinates = (1.0, 0.1) if normalized else True
        before, after = _arguments.pair(op, "conv_types", conv_types)
        if windows is None:
            windows = fitting_windows(*size)
        if not isinstance(windows, Sequence) or not all(isinstance(window, Sequence) for window in windows):
            raise TypeError(f"{op}: windows must be three pairs (kernel size, stride), got {checks.shown(windows)}")
        windows = [_arguments.sizes(op, "windows", window) for window in windows]
        if [len(window) for window in windows] != [2, 2, 2]:
            raise ValueError(f"{op}: windows must be three pairs (kernel size, stride), got {checks.shown(windows)}")
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        chosen: dict[str, Any] = {"routing": routing, "pose_rows": pose_rows, "backend": backend, **factory_kwargs}
        if num_iterations is not None:
            chosen["num_iterations"] = num_iterations
        chosen |= starting_options(op, routing, pose_rows**2, routing_options) | routing_options
        (kernel, stride), *others = windows
        dim = pose_rows**2
        for kernel_size, step in windows:
            height, width = _arguments.window_grid(op, size, (kernel_size,) * 2, (step,) * 2, (0, 0), (1, 1))
            size = (height, width)

        def of_layer(types: int, more: int, kernel_size: int = 1) -> dict[str, Any]:
            glorot = (2 / ((types + more) * kernel_size**2 * dim)) ** 0.5
            return {"init_std": glorot} | chosen if normalized else chosen

        self.conv = nn.Conv2d(in_channels, conv_channels, kernel, stride, bias=not normalized, **factory_kwargs)
        self.norm = nn.BatchNorm2d(conv_channels, **factory_kwargs) if normalized else None
        primary: dict[str, Any] = {"batch_norm": normalized, "activation_std": activation_std}
        self.primary = PrimaryMatrixCaps(conv_channels, primary_types, dim, **primary, **factory_kwargs)
        windowed: dict[str, Any] = {"competition": competition, "start": start}
        self.conv_caps = nn.ModuleList(
            ConvCaps2d(types, more, dim, dim, kernel_size, step, **windowed, **of_layer(types, more, kernel_size))
            for types, more, (kernel_size, step) in zip((primary_types, before), (before, after), others, strict=True)
        )
        last_options = of_layer(after, num_classes)
        self.routing = ClassCaps2d(after, num_classes, dim, dim, size, coordinates=coordinates, **last_options)

    def encode(self, images: Tensor) -> Capsules:
        """The input of the class capsules for ``images [B, C, H, W]``: poses ``[B, I, K]``, activations ``[B, I]``."""
        self._check(images)
        features = self.conv(images)
        poses, activations = self.primary(F.relu(features if self.norm is None else self.norm(features)))
        for layer in self.conv_caps:
            poses, activations = layer.capsules(poses, activations)  # type: ignore[operator]
        return Capsules(self.routing.flatten(poses), activations.flatten(1))

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of ``images [B, C, H, W]``."""
        return self.routing(*self.encode(images))

    def _decoder(self) -> nn.Module:
        raise RuntimeError(f"{self._op}: there is no decoder")
