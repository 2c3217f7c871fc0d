"""The arguments of a call as kernels take them: tensors, strides, sizes, precision, and the grid of each pass."""

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..options import Options
from . import config
from .config import Choice, Layer, Tiles


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def dot_precision(dtype: torch.dtype, tf32: bool) -> str:
    """DOT of the votes' product (kernels/tiles.py): float32 takes one TF32 product if that is allowed, else three."""
    if dtype != torch.float32:
        return "half"
    return "tf32" if tf32 else "tf32x3"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.view(torch.uint8)


class Plan(NamedTuple):
    """How a kernel is launched. chunk: input capsules of a split. constants: keyword arguments of every launch."""

    tiles: Tiles
    splits: int
    chunk: int
    constants: dict[str, Any]


@dataclass
class Call:
    """A call. x: u [B, I, K], or votes [B, I, J, D] without a weight. Tensors may have any strides. tf32: allowed."""

    x: Tensor
    weight: Tensor | None
    logits: Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    out_mask: Tensor | None
    options: Options
    tf32: bool = False
    sizes: tuple[int, int, int, int, int] = field(init=False)  # B, I, J, D, K
    _plans: dict[str, Plan] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.weight is None:
            self.sizes = (*self.x.shape, 1)
        else:
            B, I, K = self.x.shape
            self.sizes = (B, I, self.weight.shape[1], self.weight.shape[2], K)
        self.mask, self.out_mask = _as_bytes(self.mask), _as_bytes(self.out_mask)
        if self.bias is not None:
            self.bias = self.bias.contiguous()

    @property
    def votes_given(self) -> bool:
        return self.weight is None

    @property
    def shared(self) -> bool:
        return self.weight is not None and self.weight.shape[0] == 1

    @property
    def uniform_start(self) -> bool:
        """Whether the first coupling of a sample is one number for all (i, j): there are no logits."""
        return self.logits is None

    @functools.cached_property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.x, self.weight, self.logits, self.mask, self.out_mask)

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """The strides over b and i, and those of logits and masks. shape() has the others."""
        w_i = 0 if self.weight is None or self.shared else self.weight.stride(0)
        pairs, mask = pair_strides(self.logits), matrix_strides(self.mask)
        return (*self.x.stride()[:2], w_i, *pairs, *mask, *self.out_strides)

    @property
    def out_strides(self) -> tuple[int, ...]:
        return matrix_strides(self.out_mask)

    @functools.cached_property
    def precision(self) -> dict[str, Any]:
        return {
            "VOTES": self.votes_given,
            "DOT": dot_precision(self.x.dtype, self.tf32),
            "WIDE": self.wide,
            "LEAKY": self.options.leaky,
        }

    @functools.cached_property
    def wide(self) -> bool:
        """WIDE: whether offsets within 16 samples, all outputs and all K may need 64 bits."""
        B, I, J, D, K = self.sizes
        # The gradients of inputs, and V and ds of all iterations.
        reach = [config.ROWS * I * max(J * D, K, J), config.ROWS * 2 * self.options.num_iterations * J * D]
        for tensor in self.tensors:
            if tensor is not None and tensor is not self.weight:
                # Logits [I, J] have no axis of samples.
                batch = 0 if tensor is self.logits and tensor.dim() == 2 else config.ROWS * tensor.stride(0)
                reach.append(batch + sum((n - 1) * stride for n, stride in _inner(tensor)))
        if self.weight is not None:
            j_d_k = zip(self.weight.shape[1:], self.weight.stride()[1:], strict=True)
            reach.append(sum((n - 1) * stride for n, stride in j_d_k))
        return max(reach) >= 2**31

    @property
    def back_dot(self) -> str:
        """DOT of products with dvotes, which are float32 also if the inputs, the other operand, are 16-bit."""
        precision = dot_precision(self.x.dtype, self.tf32)
        return "tf32x2" if precision == "half" else precision

    @functools.cached_property
    def layer(self) -> Layer:
        B, I, J, D, K = self.sizes
        return Layer(J, D, 0 if self.votes_given else K, self.x.element_size(), self.shared)

    def choice(self, kernel: str) -> Choice:
        return config.choice(kernel, self.layer, self.x.device)

    def tiles(self, kernel: str) -> Tiles:
        return config.tiles(kernel, self.layer, self.choice(kernel))

    def plan(self, kernel: str) -> Plan:
        """The plan of a kernel. Made once, as the passes of a call launch it several times."""
        if kernel not in self._plans:
            tiles = self.tiles(kernel)
            splits, chunk = self.split(kernel)
            constants = {**self.shape(tiles), **self.precision, **tiles.launch}
            self._plans[kernel] = Plan(tiles, splits, chunk, constants)
        return self._plans[kernel]

    def shape(self, tiles: Tiles) -> dict[str, int]:
        """Sizes and inner strides, which are compile-time constants: then offsets in a tile need no registers."""
        B, I, J, D, K = self.sizes
        x = self.x.stride()[2:] if self.weight is None else (0, self.x.stride(2))
        w = (0, 0, 0) if self.weight is None else self.weight.stride()[1:]
        inner = dict(zip(("x_j", "x_d", "w_j", "w_d", "w_k"), (*x, *w), strict=True))
        cut = {"BB": tiles.BB, "JT": tiles.JT, "DP": tiles.DP, "KP": tiles.KP, "NT": tiles.NT}
        return {"J": J, "D": D, "K": K, **cut, **inner}

    def wanted_programs(self, kernel: str) -> int:
        if not self.x.is_cuda:
            return 3  # the interpreter runs them one by one: few, but enough to split every sum
        return cdiv(multiprocessors(self.x.device) * self.choice(kernel).resident, self.tiles(kernel).warps)

    def split(self, kernel: str) -> tuple[int, int]:
        """(splits, input capsules of a split): with the tiles of batch and outputs, they fill the device."""
        B, I, *_ = self.sizes
        tiles = self.tiles(kernel)
        others = cdiv(B, tiles.BB) * (1 if kernel == "row_norm" else tiles.groups)
        chunk = cdiv(max(I, 1), min(cdiv(self.wanted_programs(kernel), others), max(I, 1)))
        return cdiv(max(I, 1), chunk), chunk

    def split_gradient(self) -> tuple[int, int, int, int]:
        """(chunks, input capsules of a chunk, splits of the batch, batch tiles of a split) for the gradient pass."""
        B, I, *_ = self.sizes
        wanted = self.wanted_programs("gradient")
        fair = cdiv(max(I, 1), min(wanted, max(I, 1)))
        # A shared weight has a partial dW per program, so no more programs are made than fill the device.
        chunk = fair if self.shared else min(self.choice("gradient").chunk, fair)
        chunks = cdiv(max(I, 1), chunk)
        batch = cdiv(B, self.tiles("gradient").BB)
        each = cdiv(batch, min(cdiv(wanted, chunks), batch))
        return chunks, chunk, cdiv(batch, each), each

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Makes the device of the call the current one: Triton launches there, on its current stream."""
        return torch.cuda.device(self.x.device) if self.x.is_cuda else contextlib.nullcontext()

    def new(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self.x.device)

    def zeros(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float32, device=self.x.device)


def _inner(tensor: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the axes after b and i, or after the first of two axes."""
    behind = 2 if tensor.dim() > 2 else 1
    return list(zip(tensor.shape[behind:], tensor.stride()[behind:], strict=True))


def pair_strides(tensor: Tensor | None) -> tuple[int, ...]:
    """The strides over (b, i, j) of a tensor [B, I, J] or [I, J]."""
    if tensor is None:
        return (0, 0, 0)
    return tensor.stride() if tensor.dim() == 3 else (0, *tensor.stride())


def matrix_strides(tensor: Tensor | None) -> tuple[int, ...]:
    return (0, 0) if tensor is None else tensor.stride()
