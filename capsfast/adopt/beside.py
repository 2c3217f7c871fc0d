"""Compares and times a layer's own forward and capsfast's call, in the dtypes in which the layer is used."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.timing import interleave
from .calls import Signature, Size
from .fused import Dtypes
from .identification import Identification
from .probe import private_copy, take_hooks_off
from .state import LeftAloneError
from .trace import first_line
from .trial import relative

# The largest relative difference of a tensor that counts as rounding, by the dtype of the model.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
LOW = (torch.bfloat16, torch.float16)
LEAST_ROUNDS = 3
# The first timing takes so many samples.
TIMED = 8
# If the ratio with a few samples is farther from 1 than this, no larger batch is timed.
CLEAR = 1.5

# The arguments of a call, the capsules or votes first.
Given = tuple[Any, ...]
Results = tuple[Tensor, ...]


class Beside:
    """A copy of a layer without hooks, and the call of capsfast, on the same numbers.

    Attributes:
        contiguous: whether the layer's output is contiguous.
    """

    def __init__(self, layer: nn.Module, identification: Identification, signature: Signature) -> None:
        self.layer, self.identification, self.signature = private_copy(layer), identification, signature
        take_hooks_off(self.layer)
        self.contiguous = True

    def own(self, given: Given, autocast: torch.dtype | None) -> Results:
        """The tensors that the layer's own forward returns.

        Raises:
            LeftAloneError: the layer fails, or returns more.
        """
        args, kwargs = self.signature.fill(*given)
        try:
            with _under(autocast, given):
                output = self.layer.forward(*args, **kwargs)
        except Exception as error:  # other people's code may raise anything: it becomes the reason
            raise LeftAloneError(f"its forward failed on {list(given[0].shape)}: {first_line(error)}") from error
        entries = self.identification.entries
        if type(output) is not tuple and entries:
            raise LeftAloneError(f"it gives a {type(output).__name__} of {len(output)}")
        if "other" in entries:
            other = f"entry {entries.index('other')} is neither the output, nor its lengths or last coupling"
            raise LeftAloneError(f"it gives a tuple of {len(entries)}, of which {other}")
        results = tuple(result for result in output if result is not None) if entries else (output,)
        self.contiguous = (output[entries.index("output")] if entries else output).is_contiguous()
        return results

    def fused(self, given: Given, autocast: torch.dtype | None) -> Results:
        """The same results from the call of capsfast."""
        with _under(autocast, given):
            return self.identification.results(self.identification.tensors(self.layer), *given)

    def compared(self, given: Given, autocast: torch.dtype | None) -> tuple[float, tuple[torch.dtype, ...]]:
        """The largest relative difference of the results, and the dtypes of the layer's results.

        Values are enough here: identify() compared the gradients in float64.
        """
        with torch.no_grad():
            own, fused = self.own(given, autocast), self.fused(given, autocast)
        return max(map(relative, fused, own)), tuple(tensor.dtype for tensor in own)

    def few(self, given: Given, samples: int) -> Given:
        """The first samples; all of them if the layer takes no other number."""
        if self.signature.batch is not None or samples >= len(given[0]):
            return given
        sizes = {n for n, name in enumerate(self.signature.names) if self.signature.values[name] is Size}
        return tuple(
            samples if n in sizes else tensor[:samples] if isinstance(tensor, Tensor) else tensor
            for n, tensor in enumerate(given)
        )

    def results(self, given: Given) -> dict[Dtypes, tuple[torch.dtype, ...]]:
        """The dtypes of the layer's results, for each set of dtypes in which the layer runs and the call agrees.

        Casts the copy to all dtypes in turn.
        """
        dtypes: dict[Dtypes, tuple[torch.dtype, ...]] = {}
        for cast in (None, *LOW):
            self._try(dtypes, given, cast)
        for cast in LOW:
            self._try(dtypes, _to(given, cast), cast)
        for dtype in TOLERANCE:
            self.layer.to(dtype)
            self._try(dtypes, _to(given, dtype), None)
        return dtypes

    def _try(self, found: dict[Dtypes, tuple[torch.dtype, ...]], given: Given, autocast: torch.dtype | None) -> None:
        try:
            difference, dtypes = self.compared(given, autocast)
        except Exception:  # the layer or capsfast does not take these dtypes; the layer's own forward will report it
            return
        if difference <= TOLERANCE[autocast or given[0].dtype]:
            weight = next((tensor.dtype for tensor in self.identification.tensors(self.layer).values()), None)
            found[given[0].dtype, weight, autocast] = dtypes


def _to(given: Given, dtype: torch.dtype) -> Given:
    return tuple(
        tensor.to(dtype) if isinstance(tensor, Tensor) and tensor.is_floating_point() else tensor for tensor in given
    )


def _under(autocast: torch.dtype | None, given: Given) -> torch.autocast:
    # cache_enabled=False: autocast's cache would return tensors cast to bfloat16 where float16 is wanted.
    return torch.autocast(given[0].device.type, enabled=autocast is not None, dtype=autocast, cache_enabled=False)


@dataclass(frozen=True)
class Speed:
    """Median seconds of forward plus backward: the layer's own, and capsfast's. samples: the batch."""

    own: float
    fused: float
    samples: int

    @property
    def ratio(self) -> float:
        return self.own / self.fused

    def __str__(self) -> str:
        return f"{self.ratio:.1f}x ({1e3 * self.own:.3g} to {1e3 * self.fused:.3g} ms, B={self.samples})"


def speed(beside: Beside, given: Given, autocast: torch.dtype | None, seconds: float) -> Speed:
    """Times both in turns; on the whole batch if a few samples give no clear result."""
    timed = _speed(beside, beside.few(given, TIMED), autocast, seconds)
    if 1 / CLEAR < timed.ratio < CLEAR and timed.samples < len(given[0]):
        timed = _speed(beside, given, autocast, seconds)
    return timed


def _speed(beside: Beside, given: Given, autocast: torch.dtype | None, seconds: float) -> Speed:
    given = (given[0].detach().clone().requires_grad_(), *given[1:])
    inputs = [parameter for parameter in (given[0], *beside.layer.parameters()) if parameter.requires_grad]

    def step(run: Any) -> None:
        with torch.enable_grad():
            torch.autograd.grad(run(given, autocast)[0].sum(), inputs, allow_unused=True)

    steps = {"own": lambda: step(beside.own), "fused": lambda: step(beside.fused)}
    timings = interleave(steps, given[0].device, seconds, LEAST_ROUNDS)
    return Speed(timings["own"].median, timings["fused"].median, len(given[0]))
