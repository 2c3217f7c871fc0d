"""The interface of all routings, which turn votes and activations into poses and activations."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...calls import checks
from ...calls.options import Backend
from ...environment.private_torch import any_autocast, result
from .._layer import Layer
from .votes import Votes, votes_of


@result
class Capsules(NamedTuple):
    """poses ``[B, J, D]``, activations ``[B, J]`` in [0, 1] or thereabouts: how present each capsule is."""

    poses: Tensor
    activations: Tensor


def lengths(poses: Tensor, dim: int = -1) -> Tensor:
    """Lengths as activations: ``[..., D]`` to ``[...]``; ``dim``: the axis D."""
    return torch.linalg.vector_norm(poses, dim=dim)  # type: ignore[no-any-return]


# Sabour, Frosst, Hinton (2017) route 1152 to 10 capsules of size 16, and their W starts with a deviation of 0.1. Their
# weighted sums of equal coupling are then this many times as long as the input capsules.
AUTHORS_LENGTH = 0.1 * (1152 * 16) ** 0.5 / 10


class Routing(Layer):
    """Routes votes to output capsules. It holds the routing's own parameters, but not the weight.

    Your own routing overrides :meth:`route`; docs/passes.md adds one. Layers and networks take its class instead of a
    name: ``RoutedCaps(..., routing=Mine)``, ``CapsNet(routing=Mine)``, ``ConvCaps2d(..., routing=Mine)``.

    Args:
        in_caps, out_caps: numbers of capsules, I and J.
        in_dim, out_dim: sizes of a capsule, K and D; for a pose matrix, the number of its entries.
        backend: backend of all passes, see :func:`capsfast.routing_pass`.
        device, dtype: device and dtype of the parameters. Layers pass them to every routing; a class with parameters
            takes them as arguments.

    Raises:
        ValueError, TypeError: a size or an option that does not fit.
    """

    _op = "capsfast.Routing"
    # Whether the routing uses activations of the input capsules.
    uses_activation = False
    # Whether the routing needs votes in memory, and can't use votes that a pass makes.
    needs_votes = False
    # Whether samples are routed independently and deterministically: no batch statistics, no random numbers.
    # Convolutional layers then route one block of windows at a time.
    independent = False

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls._op = f"{cls.__module__.partition('.')[0]}.{cls.__name__}"

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        in_dim: int,
        out_dim: int,
        *,
        backend: Backend | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_caps, self.out_caps, self.in_dim, self.out_dim = in_caps, out_caps, in_dim, out_dim
        self.backend = backend

    def route(self, votes: Votes, activation: Tensor | None) -> Capsules | tuple[Tensor, Tensor]:
        """Routes the votes: passes over them, ``votes.moments(...)``, and torch operations in between.

        Args:
            votes: votes of B samples, I input and J output capsules; every position of an image is a sample.
            activation: activations of the input capsules, ``[B, I]``, or None for 1.

        Returns:
            A pair of tensors, poses ``[B, J, D]`` and activations ``[B, J]``, with the sizes of the votes. If lengths
            are the activations, return ``poses, poses.norm(dim=2)``.
        """
        raise NotImplementedError(f"{self._op}: a routing overrides route(votes, activation); docs/passes.md adds one")

    def weight_std(self, products: int, *, columns: int, groups: int = 1, alike: float = 1) -> float:
        """The initial deviation of a layer's weight. By default the mean vote is as long as its input capsule.

        Args:
            products: number of products whose sum is a component of a vote.
            columns: number of components of a vote that one component of the input capsule contributes to: out_dim,
                or the number of columns of a pose matrix.
            groups: number of groups of capsules, see :class:`capsfast.nn.Groups`.
            alike: number of input capsules that share a matrix.
        """
        return float(products**-0.5)

    def forward(
        self,
        votes: Any,
        activation: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        out_mask: Tensor | None = None,
        **given: Any,
    ) -> Capsules:
        """Poses and activations of the output capsules.

        Args:
            votes: a pair ``(u, weight)`` of ``[B, I, K]`` and ``[I or 1, J, D, K]`` (or pose matrices, as for
                :func:`capsfast.routing_pass`), votes ``[B, I, J, D]`` or ``[B, I, J, D, *spatial]``, or :class:`Votes`.
            activation: of the input capsules, ``[B, I]`` (and ``*spatial``), not negative; None for 1.
            mask, out_mask: bool ``[B, I]`` and ``[B, J]``; False takes a capsule out. A masked output capsule has
                pose and activation 0.
            given: further arguments of :meth:`route`.

        Returns:
            Poses ``[B, J, D]`` and activations ``[B, J]``, both with ``*spatial`` if the votes have it, in the
            dtype of the votes, or autocast's.

        Raises:
            ValueError, TypeError: a size, a dtype or a device that does not fit.
        """
        found = votes
        if mask is not None or out_mask is not None or not isinstance(votes, Votes):
            found = votes_of(self._op, votes, J=self.out_caps, mask=mask, out_mask=out_mask, backend=self.backend)
        if (self.in_caps, self.out_caps, self.out_dim) != (found.I, found.J, found.D):
            raise ValueError(
                f"{self._op}: votes must have I=in_caps={self.in_caps}, J=out_caps={self.out_caps} and "
                f"D=out_dim={self.out_dim}, got I={found.I}, J={found.J}, D={found.D}"
            )
        if activation is not None:
            if not isinstance(activation, Tensor):
                raise TypeError(f"{self._op}: activation must be a torch.Tensor, got {type(activation).__name__}")
            found.check_activation(self._op, activation)
            activation = found.samples("activation", activation)
        routed = self.route(found, activation if self.uses_activation else None, **given)
        poses, activations = self._routed(routed, found)
        if found.out_mask is not None:
            absent = ~found.out_mask
            poses, activations = poses.masked_fill(absent[..., None], 0.0), activations.masked_fill(absent, 0.0)
        kept = (found.dtype, checks.autocast_dtype(found.device) if any_autocast() else None)
        if poses.dtype not in kept:
            poses = poses.to(found.dtype)
        if activations.dtype not in kept:
            activations = activations.to(found.dtype)
        return Capsules(found.restore(poses), found.restore(activations))

    def _routed(self, result: Any, votes: Votes) -> tuple[Tensor, Tensor]:
        """The checked result of route, which may be a user's.

        Raises:
            TypeError, ValueError: not a pair of tensors, or a shape does not fit.
        """
        poses, activations = (votes.B, votes.J, votes.D), (votes.B, votes.J)
        pair = isinstance(result, (tuple, list)) and len(result) == 2
        if not pair or not isinstance(result[0], Tensor) or not isinstance(result[1], Tensor):
            error: type[Exception] = TypeError
        elif result[0].shape != poses or result[1].shape != activations:
            error = ValueError
        else:
            return result[0], result[1]
        raise error(
            f"{self._op}: route must return a pair of tensors, poses [B, J, D] = {list(poses)} and activations "
            f"[B, J] = {list(activations)}, got {_said(result)}; where lengths are the activations, return "
            f"poses, poses.norm(dim=2)"
        )


def _said(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor {checks.shape_of(result)}"
    if isinstance(result, (tuple, list)):
        return f"({', '.join(map(_said, result))})"
    return "None" if result is None else type(result).__name__


class IterativeRouting(Routing):
    """A :class:`Routing` with several iterations.

    Args:
        num_iterations: number of iterations, at least 1.
        all others: as for Routing.
    """

    def __init__(
        self, in_caps: int, out_caps: int, in_dim: int, out_dim: int, *, num_iterations: int = 3, **factory_kwargs: Any
    ) -> None:
        super().__init__(in_caps, out_caps, in_dim, out_dim, **factory_kwargs)
        self.num_iterations = num_iterations


class SummingRouting(IterativeRouting):
    """An :class:`IterativeRouting` whose output capsules are squashed weighted sums."""

    softmax = "out"

    def weight_std(self, products: int, *, columns: int, groups: int = 1, alike: float = 1) -> float:
        """Keeps the length of the authors' sums of equal coupling, see :func:`starting_std`."""
        inputs, outputs = self.in_caps // groups, self.out_caps // groups
        share = inputs if self.softmax == "in" else outputs
        return starting_std(self.num_iterations, share, inputs * columns * alike, self.out_dim, AUTHORS_LENGTH)


def starting_std(
    num_iterations: int | None, share: float, summed: float, out_dim: int, length: float | None = None
) -> float:
    """The initial deviation of a weight that gives weighted sums of equal coupling the wanted ``length``.

    With independent weights ``|s|^2 = summed (std / share)^2 |u|^2``. Iterations add about
    ``(|s| / |u|)^2 share / out_dim |u|^2`` times the output capsule to its sum. With more or smaller output capsules
    than in the authors' layer, this factor would be larger than there. Then sums start shorter, so that the factor is
    as in the authors' layer: otherwise the squash saturates as soon as the input capsules are long. At the sizes of the
    authors' layer the result is 0.1.

    Args:
        num_iterations: iterations of the routing; None for more than one.
        share: equal coupling is 1 / share.
        summed: number of products that are summed in all components of an output capsule together, times the number of
            input capsules that share a matrix: such input capsules are often alike, and their votes add up.
        out_dim: size of an output capsule.
        length: ``|s| / |u|``; default 1, for one iteration 2, because further iterations lengthen the sum.
    """
    times = (1 if num_iterations != 1 else 2) if length is None else length
    times /= AUTHORS_LENGTH
    if num_iterations != 1:
        times = min(times, (10 / 16 * out_dim / share) ** 0.5)
    return float(0.1 * (share / 10) * (1152 * 16 / summed) ** 0.5 * times)
