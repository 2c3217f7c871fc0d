"""Compares and times a layer's own forward and capsfast's call, in the dtypes in which the layer is used."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..bench.timing import interleave
from .calls import Signature
from .fused import Dtypes
from .identification import Identification
from .probe import private_copy, take_hooks_off
from .state import LeftAloneError
from .trace import first_line
from .trial import relative

# The largest relative difference of a tensor that counts as rounding, by the dtype of the model.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Enough samples for a comparison; a layer that takes only one number of samples gets that number.
SAMPLES = 4
LOW = (torch.bfloat16, torch.float16)
LEAST_ROUNDS = 3
# The first timing takes so many samples.
TIMED = 8
# If the ratio with a few samples is farther from 1 than this, no larger batch is timed.
CLEAR = 1.5

# The tensors of a call, the capsules or votes first.
Given = tuple[Tensor, ...]


class Beside:
    """A copy of a layer without hooks, and the call of capsfast, on the same numbers.

    Attributes:
        entries: length of the layer's tuple; 0 if it returns a tensor. contiguous: whether its output is contiguous.
    """

    def __init__(self, layer: nn.Module, identification: Identification, signature: Signature) -> None:
        self.layer, self.identification, self.signature = private_copy(layer), identification, signature
        take_hooks_off(self.layer)
        self.entries, self.contiguous = 0, True

    def own(self, given: Given, autocast: torch.dtype | None) -> Given:
        """The results of the layer's own forward: its output, and its coupling if it returns it.

        Raises:
            LeftAloneError: the layer fails, or returns more.
        """
        args, kwargs = self.signature.fill(*given)
        try:
            with _under(autocast, given):
                found = self.layer.forward(*args, **kwargs)
        except Exception as error:  # other people's code may raise anything: it becomes the reason
            raise LeftAloneError(f"its forward failed on {list(given[0].shape)}: {first_line(error)}") from error
        if isinstance(found, Tensor):
            self.contiguous = found.is_contiguous()
            return (found,)
        known = {self.identification.part, self.identification.coupling}
        more = [n for n, each in enumerate(found) if n not in known and each is not None]
        if type(found) is not tuple or more:
            kind = type(found).__name__
            what = f", of which entry {more[0]} is neither the output nor its last coupling" if more else ""
            raise LeftAloneError(f"it gives a {kind} of {len(found)}{what}")
        self.entries = len(found)
        parts = [part for part in (self.identification.part, self.identification.coupling) if part is not None]
        self.contiguous = found[parts[0]].is_contiguous()
        return tuple(found[part] for part in parts)

    def fused(self, given: Given, autocast: torch.dtype | None) -> Given:
        """The same results from the call of capsfast."""
        call = self.identification
        with _under(autocast, given):
            if call.coupling is None:
                return (call(call.tensors(self.layer), *given),)
            return call.with_coupling(call.tensors(self.layer), *given)

    def difference(self, given: Given, autocast: torch.dtype | None) -> float:
        """The largest relative difference of results and of gradients (capsules or votes, all parameters).

        Raises:
            LeftAloneError: the shapes of the results differ.
        """
        results: list[list[Tensor]] = []
        parameters = [*self._parameters()]
        for fused in (False, True):
            copies = tuple(each.detach().clone().requires_grad_(n == 0) for n, each in enumerate(given))
            found = self.fused(copies, autocast) if fused else self.own(copies, autocast)
            for one, other in zip(found, results[0] if results else (), strict=False):
                if one.shape != other.shape:
                    raise LeftAloneError(f"it gives {list(other.shape)}, the fused call {list(one.shape)}")
            generator = torch.Generator().manual_seed(given[0].numel())
            directions = [torch.randn(each.shape, generator=generator).to(each) for each in found]
            tensors = (*copies, *parameters)
            inputs = [each for each in tensors if each.requires_grad]
            ends = [(each, way) for each, way in zip(found, directions, strict=True) if each.requires_grad]
            outputs, ways = zip(*ends, strict=True)
            gradients = torch.autograd.grad(outputs, inputs, ways, allow_unused=True, materialize_grads=True)
            results.append([*(each.detach() for each in found), *gradients])
        return max(relative(one, other) for one, other in zip(results[1], results[0], strict=True))

    def _parameters(self) -> Iterator[Tensor]:
        for parameter in self.layer.parameters():
            if parameter.is_floating_point():
                yield parameter.requires_grad_()

    def few(self, given: Given, samples: int = SAMPLES) -> Given:
        """The first samples; all of them if the layer takes no other number."""
        return given if self.signature.batch is not None else tuple(each[:samples] for each in given)

    def results(self, given: Given, autocast: torch.dtype | None) -> dict[Dtypes, tuple[torch.dtype, ...]]:
        """For all dtypes in which the layer runs and the call agrees with it: the dtypes of the layer's results.

        The dtypes of the example are included, because :meth:`difference` compared them.
        """
        found: dict[Dtypes, tuple[torch.dtype, ...]] = {}
        own = self._weight()
        with torch.no_grad():
            found[given[0].dtype, own, autocast] = tuple(each.dtype for each in self.own(given, autocast))
            for cast in LOW:
                self._try(found, given, cast)
                self._try(found, _to(given, cast), cast)
            for dtype in TOLERANCE:
                self.layer.to(dtype)
                self._try(found, _to(given, dtype), None)
        return found

    def _weight(self) -> torch.dtype | None:
        """The dtype of the tensors that the call reads."""
        return next((each.dtype for each in self.identification.tensors(self.layer).values()), None)

    def _try(self, found: dict[Dtypes, tuple[torch.dtype, ...]], given: Given, autocast: torch.dtype | None) -> None:
        key = given[0].dtype, self._weight(), autocast
        if key in found:
            return
        try:
            own, fused = self.own(given, autocast), self.fused(given, autocast)
        except Exception:  # the layer or capsfast does not take these dtypes; the layer's own forward will report it
            return
        limit = TOLERANCE[autocast or given[0].dtype]
        if all(relative(one, other) <= limit for one, other in zip(fused, own, strict=True)):
            found[key] = tuple(each.dtype for each in own)


def _to(given: Given, dtype: torch.dtype) -> Given:
    return tuple(each.to(dtype) if each.is_floating_point() else each for each in given)


def _under(autocast: torch.dtype | None, given: Given) -> torch.autocast:
    # Without autocast's cache, which would return tensors cast to bfloat16 for float16.
    return torch.autocast(given[0].device.type, enabled=autocast is not None, dtype=autocast, cache_enabled=False)


@dataclass(frozen=True)
class Speed:
    """Median seconds of a call with ``samples`` samples: of the layer's own forward, and of capsfast's call."""

    own: float
    fused: float
    samples: int

    @property
    def ratio(self) -> float:
        return self.own / self.fused

    def __str__(self) -> str:
        return f"{self.ratio:.1f}x ({1e3 * self.own:.3g} to {1e3 * self.fused:.3g} ms, B={self.samples})"


def speeds(beside: Beside, given: Given, autocast: torch.dtype | None, seconds: float) -> tuple[Speed, Speed]:
    """Times forward, and forward plus backward, in turns; on the whole batch if a few samples give no clear result."""
    found = _speeds(beside, beside.few(given, TIMED), autocast, seconds)
    if 1 / CLEAR < found[1].ratio < CLEAR and found[1].samples < given[0].shape[0]:
        found = _speeds(beside, given, autocast, seconds)
    return found


def _speeds(beside: Beside, given: Given, autocast: torch.dtype | None, seconds: float) -> tuple[Speed, Speed]:
    copies = (given[0].detach().clone().requires_grad_(), *given[1:])
    inputs = [each for each in (*copies, *beside.layer.parameters()) if each.requires_grad]
    ways = {"own": beside.own, "fused": beside.fused}

    def forward(way: str) -> None:
        with torch.no_grad():
            ways[way](copies, autocast)

    def both(way: str) -> None:
        with torch.enable_grad():
            torch.autograd.grad(ways[way](copies, autocast)[0].sum(), inputs, allow_unused=True)

    found = []
    for run in (forward, both):
        steps = {way: lambda way=way, run=run: run(way) for way in ways}
        timings = interleave(steps, given[0].device, seconds, LEAST_ROUNDS)
        found.append(Speed(timings["own"].median, timings["fused"].median, len(given[0])))
    return found[0], found[1]
