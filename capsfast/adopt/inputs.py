"""The inputs with which a layer is probed."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .structures import orders

# Numbers of samples to probe with: few, and not the number in u.
SAMPLES = (3, 4)
# Why an argument that takes capsules out is no mask of capsfast, and what to do.
PADDING = (
    "is 1 (True) for input capsules that do not count, as torch's key_padding_mask; masks of capsfast are 1 for those "
    "that count: let the layer take such a mask and pass {opposite}"
)
COUNTS = (
    "holds a number for each sample, such as how many input capsules count; capsfast has a mask for that: let the "
    "layer take one and pass torch.arange(I, device=u.device) < {name}.view(-1, 1)"
)
ADDITIVE = "is no mask as capsfast has it; if it is added to logits, let the layer take a mask and pass {name} == 0"
UNKNOWN = "is no mask as capsfast has it"


class Draw:
    """Normal random numbers from a private generator, so that torch's generators are left unchanged."""

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(0)

    def __call__(self, like: Tensor, scale: float = 1.0) -> Tensor:
        dtype = like.dtype if like.is_floating_point() else torch.float32
        drawn = torch.randn(like.shape, dtype=dtype, device=self._generator.device, generator=self._generator)
        return scale * drawn.to(like.device)


@dataclass(frozen=True)
class Inputs:
    """u and the further arguments of a forward, with B first. sized: an int equal to B means the batch size."""

    u: Tensor
    others: tuple[Any, ...] = ()
    sized: bool = False

    def mapped(self, change: Callable[[Any], Any]) -> "Inputs":
        return replace(self, u=change(self.u), others=tuple(map(change, self.others)))

    def batch(self, size: int) -> "Inputs":
        """The first ``size`` samples; samples repeat if there are fewer."""
        B = self.u.shape[0]

        def take(value: Any) -> Any:
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == B:
                return value[torch.arange(size, device=value.device) % B]
            return size if self._is_size(value) else value

        return self.mapped(take)

    def few(self) -> "Inputs":
        return self.batch(next(size for size in SAMPLES if size != self.u.shape[0]))

    def double(self) -> "Inputs":
        return self.mapped(lambda value: value.detach().double() if _floats(value) else value)

    def random(self, draw: Draw) -> "Inputs":
        """Replaces all floats by random numbers, and tensors of 0 and 1 by a random choice."""

        def drawn(value: Any) -> Any:
            if value is self.u or not isinstance(value, Tensor) or not binary(value):
                return draw(value) if _floats(value) else value
            chosen = draw(value) < 0.3
            # No sample is masked completely.
            chosen.view(-1)[:: max(1, chosen.shape[-1] if chosen.dim() else 1)] = True
            return chosen.to(value.dtype)

        return self.mapped(drawn)

    def neutral(self, but: Collection[int] = ()) -> "Inputs":
        """Sets masks to 1 and other floats to 0, except in these arguments."""

        def still(value: Any) -> Any:
            if isinstance(value, Tensor) and binary(value):
                return torch.ones_like(value)
            # Integers may be indices, and 0 may mean something.
            return torch.zeros_like(value) if _floats(value) else value

        return replace(self, others=tuple(other if n in but else still(other) for n, other in enumerate(self.others)))

    def _is_size(self, value: Any) -> bool:
        return self.sized and isinstance(value, int) and not isinstance(value, bool) and value == self.u.shape[0]

    def with_other(self, n: int, value: Tensor) -> "Inputs":
        return replace(self, others=(*self.others[:n], value, *self.others[n + 1 :]))

    def counts(self, n: int) -> bool:
        """Whether an argument holds a number for each sample, such as its number of capsules."""
        value = self.others[n]
        return isinstance(value, Tensor) and value.dtype != torch.bool and value.numel() == self.u.shape[0]

    def absent(self, n: int) -> Iterator[tuple[str, Tensor]]:
        """What an argument may be if it is no mask of capsfast, and the value that lets all input capsules count."""
        value = self.others[n]
        if self.counts(n):
            # An index out of range would end the process's use of a GPU.
            if not value.is_floating_point() and value.device.type != "cpu":
                return
            for size in sorted({*self.u.shape[1:]}, reverse=True):
                yield COUNTS, torch.full_like(value, size)
        elif isinstance(value, Tensor) and binary(value):
            yield PADDING, torch.zeros_like(value)

    def scaled(self, factor: float) -> "Inputs":
        return replace(self, u=factor * self.u)

    def spread(self) -> "Inputs":
        """Samples of different lengths."""
        factors = 2.0 ** -torch.arange(self.u.shape[0], dtype=self.u.dtype, device=self.u.device)
        return replace(self, u=(self.u.movedim(0, -1) * factors).movedim(-1, 0))

    def sizes(self, size: Any) -> list[Any]:
        """The further arguments for ``size`` samples; tensors are left unchanged."""
        return [size if self._is_size(other) else other for other in self.others]

    def roles(self, n: int, sizes: dict[str, int], read: bool) -> Iterator[tuple[str, str]]:
        """Possible roles of a further argument, with its order of axes. read: whether the output depends on it."""
        value = self.others[n]
        if not isinstance(value, Tensor) or not read:
            yield "unused" if isinstance(value, Tensor) or self._is_size(value) else "constant", ""
            return
        shape, known = tuple(value.shape), {**sizes, "B": self.u.shape[0]}
        if binary(value):
            roles = ("mask", "mask_after")
            # A mask of floats may be any factor: try that role first. For a bool, try the mask in the softmax first.
            for role in reversed(roles) if value.is_floating_point() else roles:
                for order, _ in orders(shape, "BI", known, merged=0):
                    yield role, order


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def binary(value: Tensor) -> bool:
    """Whether the tensor holds only 0 and 1 and at least one 1 (logits may be all 0)."""
    return value.dtype == torch.bool or bool(((value == 0) | (value == 1)).all() and value.any())
