"""Routing layers of a model replaced by fused ones, each verified first."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import checks
from . import discovery, report, verification
from .discovery import Call, Candidate
from .entry import identify
from .fused import Fused, FusedLayer, Verified, fuse, fused_class, is_fused, restore, takes_class
from .identification import Identification
from .refusal import NotReproduced
from .report import Acceleration, LayerReport
from .signature import Signature
from .snapshot import RECORD, Snapshot, UnclearError
from .verification import LeftAloneError, first_line, fused_way, own_way
from .votes import gain

OP = "capsfast.accelerate"
# Enough samples to tell averaged logits from others; each more makes the search of the options longer.
SAMPLES = 4


@dataclass(frozen=True)
class Found:
    """What a layer computes, for which calls, and how long it takes."""

    fused: Fused
    report: LayerReport


def accelerate(
    model: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    *,
    dry_run: bool = False,
    only_faster: bool = True,
    tolerance: float | None = None,
    seconds: float = 0.2,
) -> Acceleration:
    """Replaces the routing of a model's layers by capsfast's, in place, where both compute the same.

    The model runs once on the example. Modules that take and give capsules, or votes, as routing does, and own a weight
    of the size that this needs, are held against capsfast: :func:`capsfast.identify` finds the options by outputs and
    gradients in float64, on random numbers and on those that reached the layer; then both run in the dtype of the
    model, and outputs and gradients must agree. Names of classes do not count. Of nested layers the outermost one that
    is reproduced is fused. Everything else stays as it is, and the report says why.

    A fused layer is the same object with the same parameters, buffers, attributes, hooks and names: optimizers,
    checkpoints, ``copy.deepcopy``, ``pickle``, ``torch.compile`` and DDP go on as before. Only its class is another, a
    subclass of its own. Calls other than the verified ones (further arguments, other sizes than the batch, another
    dtype or autocast) run the layer's own forward, and so does every call after an attribute of the layer, or of a
    module in it, was changed, added or taken away, such as its number of iterations. A second call of this function
    leaves fused layers as they are.

    Args:
        model: any module, or the layer itself. It must not have been scripted.
        example: what the model is called with: a tensor, a tuple of positional or a mapping of keyword arguments. At
            least two samples, as real as possible: sizes of the batch decide what is faster. Under autocast, if the
            model is used under it.
        dry_run: report only.
        only_faster: leave layers alone whose forward and backward would take longer.
        tolerance: the largest relative difference in the dtype of the model. Default: 1e-9 in float64, 1e-4 in float32,
            5e-2 in bfloat16, 1e-2 in float16.
        seconds: for how long each measurement of a layer goes on. There are two.

    Returns:
        The report, layer by layer. Its ``undo()`` takes everything back.

    Raises:
        TypeError: not a module, or a scripted one; a tolerance or time that is no number.
        ValueError: a tolerance or time below 0.
        Exception: what the model raises on the example.
    """
    _check(model, dry_run, only_faster, tolerance, seconds)
    with torch.inference_mode(False), torch.enable_grad():
        reports, chosen = _looked_at(model, example, dry_run, only_faster, tolerance, seconds)
    if not dry_run:
        _fuse_all(chosen)
    return Acceleration(tuple(reports), () if dry_run else tuple(chosen))


def _fuse_all(chosen: dict[nn.Module, Fused]) -> None:
    """All of them or, where one fails, none."""
    done: list[nn.Module] = []
    try:
        for layer, fused in chosen.items():
            fuse(layer, fused)
            done.append(layer)
    except BaseException:
        for layer in done:
            restore(layer)
        raise


def _looked_at(
    model: nn.Module, example: object, dry_run: bool, only_faster: bool, tolerance: float | None, seconds: float
) -> tuple[list[LayerReport], dict[nn.Module, Fused]]:
    """A report of every layer that may route, and those to be fused."""
    reports: list[LayerReport] = []
    chosen: dict[nn.Module, Fused] = {}
    done: set[nn.Module] = set()
    for module in model.modules():
        # A layer that a fused one made of its class, as one that clones itself does, was never verified.
        if is_fused(module) and RECORD not in vars(module):
            restore(module)
    for candidate in discovery.candidates(model, example):
        if candidate.layer in done:
            continue
        layer, kind = candidate.layer, type(candidate.layer).__name__
        if isinstance(layer, FusedLayer) or type(layer).__module__.startswith("capsfast."):
            fused = layer._capsfast_fused if isinstance(layer, FusedLayer) else None
            words = None if fused is None else fused.identification
            reason = "" if words else "a layer of capsfast"
            reports.append(LayerReport(candidate.name, kind, report.ALREADY, reason, words))
            done.update(layer.modules())
            continue
        try:
            device = candidate.calls[0].given[0].device.type if candidate.calls else "cpu"
            # Autocast of the caller is for the model: each call is compared under that which was around it.
            with (
                torch.autocast(device, enabled=False),
                discovery.undisturbed(layer),
                verification.unchanged(layer) as changed,
            ):
                found = _look(model, candidate, tolerance, seconds)
                verification.check_kept(changed())
        except LeftAloneError as error:
            reports.append(LayerReport(candidate.name, kind, report.LEFT_ALONE, str(error)))
            continue
        assert found.report.both is not None
        if only_faster and found.report.both.ratio < 1:
            reason = "capsfast takes longer on this example; only_faster=False replaces it all the same"
            reports.append(replace(found.report, status=report.LEFT_ALONE, reason=reason))
        else:
            chosen[layer] = found.fused
            reports.append(replace(found.report, status=report.TO_BE_FUSED if dry_run else report.FUSED))
        done.update(layer.modules())
    return reports, chosen


def _check(model: object, dry_run: object, only_faster: object, tolerance: object, seconds: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{OP}: model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"{OP}: model must be Python, got a {type(model).__name__}; accelerate it before scripting")
    checks.boolean(OP, "dry_run", dry_run)
    checks.boolean(OP, "only_faster", only_faster)
    for name, value in (("tolerance", tolerance), ("seconds", seconds)):
        if name == "tolerance" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{OP}: {name} must be a number, got {checks.shown(value)}")
        if not value >= 0:
            raise ValueError(f"{OP}: {name} must not be negative, got {checks.shown(value)}")


def _look(model: nn.Module, candidate: Candidate, tolerance: float | None, seconds: float) -> Found:
    """What the layer computes.

    Raises:
        LeftAloneError: nothing that could be put in its place.
    """
    layer = candidate.layer
    snapshot = _check_layer(candidate)
    first = candidate.calls[0]
    signature, identification = _identified(layer, first)
    calls, largest = [], 0.0
    for call in candidate.calls:
        readings = (signature,) if call is first else call.signature.readings(call.given[0].shape[0])
        verified, difference = _verified(layer, call, readings, identification, tolerance)
        calls.append(verified)
        largest = max(largest, difference)
    own, fused = own_way(layer, signature, first.autocast), fused_way(layer, identification, first.autocast)
    unknown = verification.depends_on(own, _few(first), identification.names)
    if unknown:
        raise LeftAloneError(f"its output depends on {', '.join(unknown)}, which the call of capsfast does not take")
    forward, both = verification.speeds(own, fused, first.given, seconds)
    with torch.no_grad():
        contiguous = verification.one_tensor(own, first.given).is_contiguous()
    tensors = tuple((tuple(each.shape), each.dtype) for each in identification.tensors(layer).values())
    return Found(
        Fused(identification, tuple(calls), snapshot, tensors, contiguous),
        LayerReport(
            candidate.name,
            type(layer).__name__,
            report.FUSED,
            gain(model, layer, identification, first.given, own, seconds),
            identification,
            largest,
            forward,
            both,
        ),
    )


def _check_layer(candidate: Candidate) -> Snapshot:
    """What the layer holds.

    Raises:
        LeftAloneError: it cannot be fused, whatever it computes.
    """
    layer = candidate.layer
    if candidate.why_not:
        raise LeftAloneError(candidate.why_not)
    if parametrize.is_parametrized(layer):
        raise LeftAloneError("its parameters are parametrized; accelerate the model before that is done")
    if "forward" in vars(layer):
        raise LeftAloneError("its forward was replaced by somebody else's; take that off first")
    try:
        made = fused_class(type(layer))
    except Exception as error:  # a metaclass or __init_subclass__ of anybody
        raise LeftAloneError(f"no class can be derived from its own: {first_line(error)}") from error
    try:
        takes_class(layer, made)
    except Exception as error:  # a __class__ of anybody
        raise LeftAloneError(f"its class cannot be replaced: {first_line(error)}") from error
    watched = discovery.inner_hooks(layer)
    if watched:
        raise LeftAloneError(f"hooks of {', '.join(watched)} in it would not run any more")
    if candidate.calls[0].given[0].shape[0] == 1:
        raise LeftAloneError("the example holds one sample; two or more are needed to see what depends on the batch")
    try:
        return Snapshot.of(layer)
    except UnclearError as error:
        raise LeftAloneError(f"{error}, and a change of that later would not be seen") from error


def _few(call: Call) -> tuple[Tensor, ...]:
    return tuple(each[:SAMPLES] for each in call.given)


def _identified(layer: nn.Module, call: Call) -> tuple[Signature, Identification]:
    """Options of the call, and what its arguments mean."""
    failures = []
    for signature in call.signature.readings(call.given[0].shape[0]):
        own = own_way(layer, signature, call.autocast)
        try:
            given = _few(call)
            try:
                verification.one_tensor(own, given)
            except LeftAloneError:  # one number of samples is all it takes
                given = call.given
                verification.one_tensor(own, given)
            verification.steady(own, given)

            def run(layer: nn.Module, *given: Any, signature: Signature = signature) -> Any:
                args, kwargs = signature.fill(*given)
                return layer.forward(*args, **kwargs)

            return signature, identify(layer, *given, call=run)
        except LeftAloneError as error:
            failures.append(error)
        except NotReproduced as error:
            nearest = "" if error.difference is None else f" (the nearest call differs by {error.difference:.1e})"
            failures.append(LeftAloneError(f"it is not reproduced: {error.reason}{nearest}"))
        except Exception as error:  # code of anybody, here in float64
            failures.append(LeftAloneError(f"its forward failed in float64: {first_line(error)}"))
    raise failures[-1]


def _verified(
    layer: nn.Module,
    call: Call,
    readings: tuple[Signature, ...],
    identification: Identification,
    tolerance: float | None,
) -> tuple[Verified, float]:
    failures = []
    for signature in readings:
        own, fused = own_way(layer, signature, call.autocast), fused_way(layer, identification, call.autocast)
        try:
            verification.check_masks(own, fused, call.given, identification)
            roles = identification.arguments
            known, difference = verification.verified(own, fused, signature, call.given, roles, tolerance)
            with torch.no_grad():
                result = verification.one_tensor(own, call.given).dtype
            return Verified(known, call.autocast, call.given[0].dtype, result), difference
        except LeftAloneError as error:
            failures.append(error)
    raise failures[-1]
