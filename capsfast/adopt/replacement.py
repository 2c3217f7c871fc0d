"""Replaces routing layers of a model by fused ones after a comparison."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..calls import checks
from ..environment.names import ours
from ..nn._layer import hooked
from . import beside as timing
from . import report
from .beside import TOLERANCE, Beside
from .calls import Signature
from .fused import Fused, FusedLayer, can_be_fused, fuse, is_fused, restore
from .identification import Identification
from .report import Acceleration, LayerReport
from .search import Search, searched
from .snapshot import Snapshot
from .state import RECORD, LeftAloneError, State
from .trace import first_line
from .trial import NotReproduced
from .watch import Candidate, candidates

OP = "capsfast.accelerate"
# Enough samples for a comparison; a layer that takes only one number of samples gets that number.
COMPARED = 4
SLOWER = "capsfast takes longer on this example; only_faster=False replaces the layer anyway"
NAMELESS = (
    "the model calls it but has no such module under a name: the forward makes it, or a list or mapping holds it; make "
    "it once, and keep it as an attribute or in a torch.nn.ModuleList"
)
VOTES_IN_MEMORY = (
    "its votes are in memory; if a product with a weight makes them, one capsfast.DynamicRouting instead of both "
    "never forms them"
)


def accelerate(
    model: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    dry_run: bool = False,
    only_faster: bool = True,
    seconds: float = 0.2,
) -> Acceleration:
    """Replaces routing in a model's layers by capsfast, in place, if both compute the same.

    The model runs once on the example. Modules whose inputs, outputs and weights have the shapes of routing are
    compared with capsfast. :func:`capsfast.identify` finds the options from outputs, gradients and a trace of a float64
    copy. Then layer and capsfast run in all dtypes in which the layer may be used, and must agree in the dtype of the
    example up to rounding: 1e-9 in float64, 1e-4 in float32, 5e-2 in bfloat16, 1e-2 in float16. Names of classes do not
    count. If a layer and a layer inside it are reproduced, the outer layer is fused. All other layers are left
    unchanged, and the report gives the reason.

    A fused layer is the same object with the same parameters, buffers, attributes, hooks and names: optimizers,
    checkpoints, ``copy.deepcopy``, ``pickle``, ``torch.compile`` and DDP work as before. Only its class becomes a
    subclass of the original class. It runs fused under autocast and after ``.to(dtype)`` too. The layer runs its own
    forward if arguments or sizes (except the batch) differ from the example, for one sample if the layer squeezes, and
    after an attribute or inner module was changed; it then warns once, with the reason. Fused layers are skipped by a
    second call of this function.

    The run on the example leaves the model as it was, except if the run builds parts: parameters, buffers or modules
    where nothing was, or lazy modules. Then the model is as after its first call, with its modes and the random numbers
    of torch as before. After an error or a dry run all is as before.

    Args:
        model: any module, or the layer itself. It must not be scripted.
        example: the input of the model: a tensor, a tuple of positional or a mapping of keyword arguments. At least
            two samples, as real as possible: the batch size decides what is faster.
        dry_run: report only.
        only_faster: leave a layer alone if its own forward plus backward is faster. In a DistributedDataParallel
            model the first rank decides for all.
        seconds: how long each of the one or two timings of a layer takes.

    Returns:
        The report, layer by layer. ``undo()`` restores all layers; ``calls()`` counts calls.

    Raises:
        TypeError: model is not a module, or is scripted; seconds is not a number.
        ValueError: seconds is below 0.
        Exception: any error of the model on the example.

    Example:
        >>> report = capsfast.accelerate(model, images)  # your network, and a batch for it
        >>> report.fused  # the layers that capsfast computes from now on
        ('digits',)
        >>> report.undo()
    """
    _check(model, dry_run, only_faster, seconds)
    for module in model.modules():
        # A layer that a fused layer made from its own class, for example a clone, was never compared.
        if is_fused(module) and RECORD not in vars(module):
            restore(module)
    before = Snapshot(model)
    try:
        return _accelerated(model, example, before, dry_run, only_faster, seconds)
    except BaseException:
        before.restore()
        raise


def _accelerated(
    model: nn.Module, example: object, before: Snapshot, dry_run: bool, only_faster: bool, seconds: float
) -> Acceleration:
    with torch.inference_mode(False), torch.enable_grad():
        reports, chosen = _looked_at(model, example, before, seconds)
    if only_faster:
        slow = _slow(model, reports)
        stays: dict[str, Any] = {"status": report.LEFT_ALONE, "reason": SLOWER}
        reports = [
            replace(layer_report, **stays) if layer_report.name in slow else layer_report for layer_report in reports
        ]
    layers = {
        layer_report.name: model.get_submodule(layer_report.name)
        for layer_report in reports
        if layer_report.status == report.FUSED
    }
    if dry_run:
        before.restore()
        planned = (
            replace(layer_report, status=report.TO_BE_FUSED) if layer_report.name in layers else layer_report
            for layer_report in reports
        )
        return Acceleration(tuple(planned))
    for layer in layers.values():
        fuse(layer, chosen[layer])
    return Acceleration(tuple(reports), tuple(layers.values()))


def _slow(model: nn.Module, reports: list[LayerReport]) -> list[str]:
    """Names of the layers that would take longer, by the times of the first rank if there are several."""
    slow = [
        layer_report.name for layer_report in reports if layer_report.speed is not None and layer_report.speed.ratio < 1
    ]
    if isinstance(model, nn.parallel.DistributedDataParallel) and dist.is_initialized():
        group = model.process_group
        heard = [slow]
        dist.broadcast_object_list(heard, dist.get_global_rank(group, 0), group)
        slow = heard[0]
    return slow


def _looked_at(
    model: nn.Module, example: object, before: Snapshot, seconds: float
) -> tuple[list[LayerReport], dict[nn.Module, Fused]]:
    """A report of every layer that may route, and the fused call of every layer that capsfast reproduces."""
    reports: dict[nn.Module, LayerReport] = {}
    chosen: dict[nn.Module, Fused] = {}
    done: set[nn.Module] = set()
    nameless: set[str] = set()
    for candidate in candidates(model, example, before):
        layer, kind = candidate.layer, type(candidate.layer).__name__
        if layer in done:
            continue
        if candidate.nameless:
            # A forward may make several modules of one class: one report for the class.
            if done.isdisjoint(candidate.around) and not ours(type(layer)) and kind not in nameless:
                reports[layer] = LayerReport(f"<{kind}>", kind, report.LEFT_ALONE, NAMELESS)
                nameless.add(kind)
            done.add(layer)
            continue
        told = LayerReport(candidate.name, kind, report.ALREADY)
        if isinstance(layer, FusedLayer):
            told = replace(told, identification=layer._capsfast_fused.identification)  # type: ignore[union-attr]
        elif ours(type(layer)):
            told = replace(told, reason="a layer of capsfast")
        else:
            try:
                # The comparison sets autocast as it was around the layer's call, so the caller's autocast is off here.
                with torch.autocast(candidate.device, enabled=False):
                    chosen[layer], told = _found(candidate, seconds)
            except LeftAloneError as error:
                reports[layer] = replace(told, status=report.LEFT_ALONE, reason=str(error))
                continue
        reports[layer] = told
        done.update(layer.modules())
    # A module around a fused layer needs no report: it does more than the layer.
    return [
        layer_report
        for layer, layer_report in reports.items()
        if layer_report.status != report.LEFT_ALONE or not any(inner in chosen for inner in layer.modules())
    ], chosen


def _check(model: object, dry_run: object, only_faster: object, seconds: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{OP}: model must be Python, got a {type(model).__name__}; accelerate it before scripting")
    checks.boolean(OP, "dry_run", dry_run)
    checks.boolean(OP, "only_faster", only_faster)
    if not checks.number(OP, "seconds", checks.plain(seconds)) >= 0:
        raise ValueError(f"{OP}: seconds must not be negative, got {checks.shown(seconds)}")


def _found(candidate: Candidate, seconds: float) -> tuple[Fused, LayerReport]:
    """The fused call of a layer, and its report.

    Raises:
        LeftAloneError: the layer can't be fused.
    """
    layer, autocast = candidate.layer, candidate.autocast
    _check_layer(candidate)
    signature, identification, search = _identified(candidate)
    saved = {name for name, _ in (*layer.named_buffers(), *layer.named_parameters())} | {*identification.names}
    kept = [name for name in search.probe.written if name in saved]
    if kept:
        raise LeftAloneError(f"its forward keeps {', '.join(kept)} in the layer, which a fused one would not")
    state = State.of(layer, search.probe.written)
    changed = state.changed(search.probe.layer)
    if changed is not None:
        raise LeftAloneError(f"its forward changes `{changed}` in the layer, which a fused one would not")
    beside = Beside(layer, identification, signature)
    few = beside.few(candidate.given, COMPARED)
    difference, _ = beside.compared(few, autocast)
    dtype = autocast or few[0].dtype
    if not difference <= TOLERANCE[dtype]:
        raise LeftAloneError(f"capsfast's call differs from it by {difference:.1e} in {dtype}".replace("torch.", ""))
    speed = timing.speed(beside, candidate.given, autocast, seconds)
    shapes = tuple(tuple(tensor.shape) for tensor in identification.tensors(layer).values())
    # Last, because this casts the copy.
    results = beside.results(few)
    fused = Fused(identification, signature, results, state, shapes, beside.contiguous, search.single)
    names = ", ".join(f"`{name}`" for name in search.probe.written)
    said = [f"its own forward writes {names}, which a fused one leaves as it is"] if names else []
    said += [VOTES_IN_MEMORY] if identification.weight is None else []
    reason, kind = "\n".join(said), type(layer).__name__
    return fused, LayerReport(candidate.name, kind, report.FUSED, reason, identification, difference, speed)


def _check_layer(candidate: Candidate) -> None:
    """
    Raises:
        LeftAloneError: the layer can't be fused, whatever it computes.
    """
    layer = candidate.layer
    if parametrize.is_parametrized(layer):
        raise LeftAloneError("its parameters are parametrized; accelerate the model before that is done")
    if type(layer).__call__ is not nn.Module.__call__:
        raise LeftAloneError("its class has a __call__ of its own, which would not run")
    if "forward" in vars(layer):
        raise LeftAloneError("its forward was replaced by other code; restore it first")
    if candidate.why_not:
        raise LeftAloneError(candidate.why_not)
    try:
        can_be_fused(layer)
    except Exception as error:  # the class may have any metaclass, __init_subclass__ or __class__
        raise LeftAloneError(f"no class can be derived from its own: {first_line(error)}") from error
    watched = [name for name, module in layer.named_modules() if name and hooked(module)]
    if watched:
        raise LeftAloneError(f"hooks of {', '.join(watched)} in it would not run any more")
    if candidate.given[0].shape[0] == 1:
        raise LeftAloneError("the example holds one sample; two or more are needed to see what depends on the batch")


def _identified(candidate: Candidate) -> tuple[Signature, Identification, Search]:
    """The signature of the call with the meaning of its ints, the identification, and the search.

    Raises:
        LeftAloneError: capsfast has no such call, or is in doubt.
    """
    call, (u, *others) = candidate.signature, candidate.given
    assert call is not None

    def run(layer: nn.Module, *given: Any, fill: Any = call.fill) -> Any:
        args, kwargs = fill(*given)
        return layer.forward(*args, **kwargs)

    try:
        identification, search = searched(candidate.layer, u, tuple(others), run, names=call.names)
    except NotReproduced as error:
        nearest = "" if error.difference is None else f" (the nearest call differs by {error.difference:.1e})"
        raise LeftAloneError(f"it is not reproduced: {error.reason}{nearest}") from error
    except Exception as error:  # other people's code, here in float64
        raise LeftAloneError(f"its forward failed in float64: {first_line(error)}") from error
    if search.doubts:
        raise LeftAloneError(search.doubts[0])
    call = call.with_size(len(u)) if search.given.sized else call
    return replace(call, batch=len(u) if search.fixed else None), identification, search
