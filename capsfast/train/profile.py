"""How much of a training step is routing."""

from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

from torch import nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from .. import checks
from ..backend import use_backend
from ..data import Batch
from ..nn import ConvCaps2d, RoutedCaps, RoutingByAgreement, SlimConvCaps2d
from .learner import Learner

STEP, ROUTING = "capsfast: step", "capsfast: routing"
LAYERS = (ConvCaps2d, RoutedCaps, RoutingByAgreement, SlimConvCaps2d)


class StepShare(NamedTuple):
    """Medians over the steps: seconds of a training step (attack, forward, backward, clipping, optimizer, as far as the
    learner has them), and of its routing layers."""

    step: float
    routing: float

    @property
    def share(self) -> float:
        return self.routing / self.step


def _outermost(module: nn.Module) -> list[nn.Module]:
    """The routing layers; not those inside of one."""
    if isinstance(module, LAYERS):
        return [module]
    return [layer for child in module.children() for layer in _outermost(child)]


class _Ranges:
    """Marks the forward and the backward pass of layers for the profiler.

    The hooks of one layer enclose all of its backward nodes: those of its parameters are younger than the
    one that its inputs pass through, and autograd runs younger nodes first.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self._open: dict[nn.Module, Any] = {}
        self._handles = []
        for layer in layers:
            self._handles += [
                layer.register_forward_pre_hook(self._enter),
                layer.register_forward_hook(self._leave),
                layer.register_full_backward_pre_hook(self._enter),
                layer.register_full_backward_hook(self._leave),
            ]

    def _enter(self, layer: nn.Module, *_: Any) -> None:
        self._open[layer] = record_function(ROUTING)
        self._open[layer].__enter__()

    def _leave(self, layer: nn.Module, *_: Any) -> None:
        self._open.pop(layer).__exit__(None, None, None)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def routing_share(learner: Learner, batch: Batch, *, backend: str | None = None, steps: int = 10) -> StepShare:
    """Times training steps on one batch with torch.profiler. The weights are as before afterwards.

    The steps are those of the learner, with its adversary, its optimizer and its clipping; the learning rate is that
    after the warm-up.

    Args:
        learner: the network, on the device that is asked about.
        batch: the images, on the same device.
        backend: forces one for all routing; ``"reference"`` is eager einsum. None takes the fastest.
        steps: profiled, after 3 that warm up.

    Returns:
        Times of the CPU, or on a CUDA device those of its kernels.

    Raises:
        RuntimeError: the backend is not available or can't serve the model.
        ValueError: no steps.
    """
    if steps < 1:
        raise ValueError(f"capsfast.train.routing_share: steps must be at least 1, got {checks.shown(steps)}")
    before = {name: value.clone() for name, value in learner.state_dict().items()}
    optimizer = learner.make_optimizer()
    on_gpu = learner.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu

    def step() -> None:
        with record_function(STEP):
            found, _ = learner.measured(batch, learner.attacked(batch))
            optimizer.zero_grad()
            found["loss"].backward()
            if learner.clip is not None:
                nn.utils.clip_grad_norm_(learner.parameters(), learner.clip)
            optimizer.step()

    ranges = _Ranges(_outermost(learner))
    training = learner.training
    try:
        learner.train()
        with nullcontext() if backend is None else use_backend(backend):
            return _profiled(step, steps, activities, on_gpu)
    finally:
        ranges.remove()
        learner.train(training)
        learner.zero_grad()
        learner.load_state_dict(before)


def _profiled(step: Callable[[], None], steps: int, activities: list[ProfilerActivity], on_gpu: bool) -> StepShare:
    for _ in range(3):
        step()
    with profile(activities=activities) as found:
        for _ in range(steps):
            step()
    # The ranges themselves, not what a GPU's timeline repeats of them.
    ranges = [each for each in found.events() if each.device_type == DeviceType.CPU]

    def seconds(event: Any) -> float:
        return 1e-6 * float(event.device_time_total if on_gpu else event.cpu_time_total)

    whole, routing = [], []
    for outer in ranges:
        if outer.name == STEP:
            within = [
                each
                for each in ranges
                if each.name == ROUTING and outer.time_range.start <= each.time_range.start <= outer.time_range.end
            ]
            whole.append(seconds(outer))
            routing.append(sum(map(seconds, within)))
    return StepShare(median(whole), median(routing))
