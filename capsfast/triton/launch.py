"""The arguments of a call as kernels take them: tensors, strides, sizes, precision, and the grid of each pass."""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from ..calls.arguments import PassParameters
from ..calls.options import SOFTMAX, PassOptions, RoutingOptions
from . import config
from .config import Choice, LayerSizes, Tiles, power_of_two
from .kernels.arguments import Shape
from .plan import Slot

# Programs that count as running at once in the interpreter, which runs one by one: few, but enough to split every sum.
INTERPRETED = 3
# The interpreter multiplies the 16 bits of a bfloat16 as an integer. So kernels convert 16-bit operands to float32 in
# the interpreter; tests repair the interpreter instead, because they interpret what GPUs do.
WIDENED = triton.knobs.runtime.interpret
# The K of one matrix instruction with 16-bit operands, or of two with float32 operands.
LONGEST = 16
# The most parts of a sum. Four warps of a step add up 128 at once.
MOST_SPLITS = 1024
# Bytes of the partial dW of a shared weight.
MOST_PARTIAL_WEIGHTS = 256 * 1024**2
# The most programs that CUDA allows along the second axis of a grid.
MOST_CHUNKS = 65535


def dot_precision(dtype: torch.dtype, tf32: bool) -> str:
    """DOT of the votes' product, see kernels/products.py: float32 takes one TF32 product if allowed, else three."""
    if dtype != torch.float32:
        return "ieee" if WIDENED else "half"
    if torch.version.hip is not None:
        return "ieee"
    return "tf32" if tf32 else "tf32x3"


def compiled_in(values: Any) -> Any:
    """A tuple of constants as kernels take it. The static_range() of Triton 3.6 takes no plain numbers, the interpreter
    takes nothing else."""
    return values if triton.knobs.runtime.interpret else type(values)(*map(triton.language.constexpr, values))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def reach(tensor: Slot, begin: int, end: int) -> int:
    """Span of axes [begin, end), in elements."""
    return sum((n - 1) * step for n, step in zip(tensor.shape[begin:end], tensor.stride()[begin:end], strict=True))


def programs(device: torch.device, warps: int) -> int:
    """How many programs of ``warps`` warps the device runs at once."""
    if device.type != "cuda":
        return INTERPRETED
    return torch.cuda.get_device_properties(device).multi_processor_count * max(1, config.RESIDENT_WARPS // warps)


def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor. torch for ROCm does not tell."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return getattr(properties, "shared_memory_per_multiprocessor", config.SHARED)


def bytes_of(mask: Slot | None) -> Any:
    """The mask, contiguous, as bytes."""
    if mask is None:
        return None
    mask = mask.contiguous()
    return Slot(mask.plan, mask.memory, mask.ghost.view(torch.uint8))


def plain(value: Tensor | None, out_mask: Tensor | None = None) -> Tensor | None:
    """The value as contiguous float32, with 0 where out_mask [B, J] hides outputs, whose values may be NaN."""
    if value is None:
        return None
    value = value.float()
    if out_mask is not None:
        value = value.masked_fill(~(out_mask if value.dim() == 2 else out_mask[:, :, None]), 0.0)
    return value.contiguous()


@dataclass
class KernelCall:
    """A call. x: u [B, I, P K] if there is a weight [I or 1, J, D / P, K], otherwise votes [B, I, J or 1, D]. Tensors
    may have any strides; all but x and the weight are copied if they are not contiguous. tf32: whether TF32 is allowed.

    parameters: PassParameters of slots. A routing has logits and masks there, and scores with V. From here on the masks
    are bytes, and query, precision, center, prior and activation are float32, with 0 for masked capsules.

    outputs: J, if the shape of x does not contain J. With votes [B, I, J, D, S] every position is a sample, and all
    parameters but logits have a row for every sample. Logits [B, I, J, S] stay as they are.

    own_parameters: query, precision, center and prior are from kernels, so no copy makes them 0 for masked capsules.

    together: how many input capsules a kernel takes as one input capsule, with ``together`` times as many components.
    sizes count them as one.

    Attributes: sizes, (B or B S, I, J, D, K). poses: P. positions: S, or None for votes that have no axis of
    positions. shared: all input capsules have one weight; shared_logits: all samples have logits [I, J]; common: all
    output capsules have the same votes. of_pass: the call is a pass, not a routing; second: it makes second moments.
    normalize, iterations: of a pass, or of a routing. squashes: of an iteration, and of the last. numbers: arguments of
    every step between passes. accumulate: V is the sum of all v so far, not the last v. query: votes are scored with a
    query or with V. quadratic: the call takes more from the votes than a dot product and the first moment. agreement:
    the votes have a gradient through the logits. uniform_start: the first coupling of a sample is one number for all
    (i, j), because nothing scores the votes.
    """

    x: Slot
    weight: Slot | None
    parameters: Any
    options: PassOptions | RoutingOptions
    tf32: bool = False
    outputs: int | None = None
    bias: Slot | None = None
    together: int = 1
    own_parameters: bool = False

    def __post_init__(self) -> None:
        x, weight, options = self.x, self.weight, self.options
        query, precision, center, prior, given_logits, activation, lse, mask, out_mask = self.parameters
        self.bias = None if self.bias is None else self.bias.contiguous()
        logits: Any = None if given_logits is None else given_logits.contiguous()
        if not self.own_parameters:
            query, precision, center, prior = (
                None if value is None else value.plan.compute(plain, value, out_mask)
                for value in (query, precision, center, prior)
            )
        activation = None if activation is None else activation.plan.compute(plain, activation)
        self.parameters = PassParameters(
            query, precision, center, prior, logits, activation, lse, bytes_of(mask), bytes_of(out_mask)
        )
        # precision and center as kernels read them, see passes.arrange()
        self.arranged: tuple[Slot | None, Slot | None] = (None, None)
        self.positions: int | None = None
        self.poses = 1
        if weight is None:
            B, I, J, D, *positions = x.shape
            self.positions = positions[0] if positions else None
            J = J if self.outputs is None else self.outputs
            self.sizes = (B * math.prod(positions), I, J, D, 1)
        else:
            B, I, numbers = x.shape
            _, J, R, K = weight.shape
            self.poses = 1 if K == 0 else numbers // K
            self.sizes = (B, I // self.together, J, self.poses * R, K * self.together)
        self.shared = weight is not None and weight.shape[0] == 1
        self.shared_logits = logits is not None and logits.dim() == 2
        self.common = weight is None and x.shape[2] != J
        self.of_pass = isinstance(options, PassOptions)
        if isinstance(options, PassOptions):
            self.normalize, self.iterations, self.second = options.normalize, 1, options.second
            self.squashes, self.numbers = ("identity", "identity"), (0.0, 1.0)
            self.accumulate = True
            self.query = query is not None
            self.quadratic = options.second or precision is not None or center is not None
            self.agreement = self.query or precision is not None
            scored = self.agreement or logits is not None or prior is not None
            self.uniform_start = not scored and options.normalize in SOFTMAX
        else:
            self.normalize, self.iterations, self.second = options.softmax, options.num_iterations, False
            self.squashes = (options.squash, options.last_squash)
            self.numbers, self.accumulate = (options.eps, options.sharpness), options.accumulate
            self.query, self.quadratic, self.agreement = True, False, options.gradient == "full"
            self.uniform_start = logits is None

    @functools.cached_property
    def tensors(self) -> tuple[Slot | None, ...]:
        _, _, _, prior, logits, activation, _, mask, out_mask = self.parameters
        return (self.x, self.weight, logits, mask, out_mask, *self.arranged, prior, activation)

    @property
    def strip(self) -> int:
        """Rows of a strip, see kernels/strips.py."""
        return 1 if self.weight is None else config.ROWS

    @property
    def small(self) -> bool:
        """Whether the batch is one strip. Then programs have 16 rows, and there are many splits, which four warps of a
        step add up."""
        return self.sizes[0] * power_of_two(self.poses) <= config.ROWS

    @property
    def sample_stride(self) -> int:
        """The stride of x over samples or, with positions, over positions."""
        return self.x.stride(0 if self.positions is None else 4)

    @functools.cached_property
    def walk(self) -> tuple[int | None, ...]:
        """Arguments of every launch: the strides of x over samples and i, the stride of the weight over i; what
        positions need in addition, or None; B and I. Shape has the other strides.

        Positions need their number S, the strides of x over i, j, d, and the stride of x over b less S strides over
        positions. These are arguments, so a new number of positions compiles no new kernel.
        """
        w_i = 0 if self.weight is None or self.shared else self.weight.stride(0)
        if self.positions is None:
            n = self.together
            return (self.sample_stride, n * self.x.stride(1), n * w_i, *(None,) * 5, *self.sizes[:2])
        jump = self.x.stride(0) - self.positions * self.sample_stride
        return (self.sample_stride, 0, w_i, self.positions, *self.x.stride()[1:4], jump, *self.sizes[:2])

    def merged(self) -> "KernelCall":
        """The call for a uniform pass, which adds up votes: several input capsules of few components make one product.

        The input capsules must have no mask, and u must have their components side by side.
        """
        B, I, J, D, K = self.sizes
        apart = self.weight is None or self.poses > 1 or self.parameters.mask is not None or self.of_pass
        if apart or not 0 < K <= LONGEST // 2 or self.x.stride(1) != K * self.x.stride(2):
            return self
        return replace(self, together=max(1, math.gcd(I, LONGEST // K)))

    def refuse_far(self) -> None:
        """Kernels have 32 bits for offsets within the samples of a tile, all outputs and all K.

        Raises:
            RuntimeError: a tensor reaches further.
        """
        B, I, J, D, K = self.sizes
        samples = min(B, max(2 * config.ROWS, power_of_two(self.poses)))
        rows = min(cdiv(B * power_of_two(self.poses), self.strip) * self.strip, 2 * config.ROWS)
        of_sample = I * (J * D if self.weight is None else max(J, self.poses * K))
        reaches = {
            "a gradient": samples * of_sample if self.positions is None else J * D * self.positions,
            "V of all iterations": rows * 8 * self.iterations * J * config.fours(D // self.poses),
            "u or votes": max(samples - 1, 0) * self.sample_stride + reach(self.x, 2, 4),
            "the weight": 0 if self.weight is None else max(reach(self.weight, 1, 4), math.prod(self.weight.shape[1:])),
        }
        name, most = max(reaches.items(), key=lambda reach: reach[1])
        if most >= 2**31:
            raise RuntimeError(
                f"capsfast: backend 'triton' serves tensors that reach less than 2**31 numbers in {samples} samples, "
                f"{name} would reach {most}; pass contiguous tensors, or take backend 'cuda' or 'reference'"
            )

    @property
    def back_dot(self) -> str:
        """DOT of products with dvotes. dvotes are float32 even if the other operand, the inputs, has 16 bits.

        For float16 inputs, dvotes are not split into two float16 numbers, because they may be out of range.
        """
        if torch.version.hip is not None or (WIDENED and self.x.dtype != torch.float32):
            return "ieee"
        if self.x.dtype == torch.bfloat16:
            return "bf16x2"
        precision = dot_precision(self.x.dtype, self.tf32)
        return "tf32x2" if precision == "half" else precision

    @functools.cached_property
    def layer(self) -> LayerSizes:
        B, I, J, D, K = self.sizes
        K = 0 if self.weight is None else max(K, 1)
        return LayerSizes(J, D // self.poses, K, self.x.element_size(), self.poses)

    def choice(self, kernel: str) -> Choice:
        """The row of config.TABLE for this call. kernel: the first word of the row's name."""
        name = f"{kernel} votes" if self.weight is None else kernel
        if self.quadratic and f"{name} quadratic" in config.TABLE:
            name = f"{name} quadratic"
        choice = config.TABLE[name]
        return choice._replace(down=1) if self.small else choice

    def tiles(self, kernel: str) -> Tiles:
        return config.tiles(kernel, self.layer, self.choice(kernel), shared_memory(self.x.device))

    def constants(self, kernel: str) -> dict[str, Any]:
        """Keyword arguments of every launch. T has sizes and inner strides: if they are compiled in, offsets in a tile
        need no registers."""
        self.refuse_far()
        _, _, J, D, K = self.sizes
        tiles = self.tiles(kernel)
        if self.positions is not None:
            x = (0, 0)  # arguments of the launch, see walk
        elif self.weight is None:
            x = (0 if self.common else self.x.stride(2), self.x.stride(3))
        else:
            x = (0, self.x.stride(2))
        w = (0, 0, 0) if self.weight is None else self.weight.stride()[1:]
        # The last section may have whole tiles without any output.
        outside = tiles.sections * tiles.NT * tiles.JT - J >= tiles.JT
        _, _, center, *_, mask, out_mask = self.parameters
        masked = outside or any(value is not None for value in (mask, out_mask, center))
        T = Shape(
            J, D, K, self.poses, power_of_two(self.poses), *tiles[:6], self.weight is None,
            dot_precision(self.x.dtype, self.tf32), self.shared_logits, self.options.leaky, self.query, self.quadratic,
            masked, tiles.sections > 1, *x, *w,
        )  # fmt: skip
        return {"T": compiled_in(T), "num_warps": tiles.warps, "num_stages": tiles.stages}

    def batch_tiles(self, tiles: Tiles) -> int:
        if self.positions is not None:
            return self.x.shape[0] * cdiv(self.positions, tiles.BB)
        return cdiv(self.sizes[0], tiles.BB // power_of_two(self.poses))

    def split(self, kernel: str) -> tuple[int, int]:
        """(splits, input capsules of a split). Splits times tiles of batch and outputs make as many programs as the
        device runs at once."""
        B, I, *_ = self.sizes
        tiles = self.tiles(kernel)
        others = self.batch_tiles(tiles) * tiles.sections
        # row_norm takes half the registers of the other loops, so twice as many of its programs run at once.
        wanted = programs(self.x.device, tiles.warps) * (2 if kernel == "row_norm" else 1)
        # Rounded down: a few more programs would take as long as a whole second round.
        chunk = cdiv(max(I, 1), min(max(1, wanted // others), MOST_SPLITS, max(I, 1)))
        return cdiv(max(I, 1), chunk), chunk

    def split_gradient(self, kernel: str) -> tuple[int, int, int, int]:
        """(chunks, input capsules of a chunk, splits of the batch, batch tiles of a split) for the gradient pass."""
        B, I, *_ = self.sizes
        tiles = self.tiles(kernel)
        wanted = programs(self.x.device, tiles.warps)
        if self.shared:
            # A shared weight has a partial dW per program: MOST_PARTIAL_WEIGHTS limits the programs too.
            assert self.weight is not None
            wanted = min(wanted, max(1, MOST_PARTIAL_WEIGHTS // (4 * max(1, self.weight[0].numel()))))
        fair = cdiv(max(I, 1), min(wanted, max(I, 1)))
        least = max(fair if self.shared else min(self.choice(kernel).chunk, fair), cdiv(I, MOST_CHUNKS))
        chunks, batch = cdiv(max(I, 1), least), self.batch_tiles(tiles)

        def cut(parts: int) -> tuple[int, int, int]:
            """Turns of a program, input capsules of a chunk, batch tiles of a split."""
            size = cdiv(batch, parts)
            # Makes chunks longer rather than the grid a few programs larger than the device.
            chunk = least if parts == 1 else max(least, cdiv(I, max(1, wanted // parts)))
            return size * chunk, chunk, size

        fewest = min(max(1, wanted // chunks), max(batch, 1))
        more = fewest if self.shared else min(fewest + 1, max(batch, 1))
        _, chunk, size = min(cut(fewest), cut(more), key=operator.itemgetter(0))
        return cdiv(max(I, 1), chunk), chunk, cdiv(batch, max(size, 1)), size

    def new(self, *size: int, dtype: torch.dtype = torch.float32) -> Slot:
        return self.x.plan.new(*size, dtype=dtype)

    def new_pairs(self, dtype: torch.dtype) -> Slot:
        """[B, I, J] or [B, I, J, S]"""
        positions = () if self.positions is None else (self.positions,)
        return self.new(self.x.shape[0], self.x.shape[1], self.sizes[2], *positions, dtype=dtype)

    def vectors(self, *S: int, zeros: bool = False) -> Any:
        """Memory for vectors in the order of kernels/strips.py: [strips, J, *S, fours, 16, 4]."""
        B, _, J, D, _ = self.sizes
        strips = cdiv(B * power_of_two(self.poses), self.strip)
        size = (strips, J, *S, config.fours(D // self.poses), self.strip, 4)
        return self.zeros(*size) if zeros else self.new(*size)

    def zeros(self, *size: int) -> Any:
        return self.x.plan.zeros(*size)

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """As Plan.compute()."""
        return self.x.plan.compute(function, *arguments)
