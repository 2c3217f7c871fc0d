"""Measures what a routing layer does with its inputs, and says in words what is wrong."""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .calls import checks
from .calls.options import Softmax
from .nn import ConvCaps2d, CouplingEntropy, MarginLoss, RoutedCaps, RoutingByAgreement
from .nn.couplings import as_capsfast, routed_by_passes, shares_of

__all__ = ["Diagnosis", "Finding", "diagnose"]

# The derivative of the paper's squash with respect to |s| is 2 |s| / (1 + |s|^2)^2: 0.006 where the length is
# LONG, 0.06 where it is SHORT.
LONG = 0.98
SHORT = 1e-3
Layer = RoutedCaps | RoutingByAgreement
# A capsule below this share of the longest, or of an equal share of the coupling, counts as dead.
DEAD_SHARE = 0.01
COLLAPSED = 0.95
BOUNDED = ("paper", "half", "eps_outside", "exp")


class Finding(NamedTuple):
    """name: one of "not finite", "saturated", "faded", "dead outputs", "dead inputs", "collapsed", "no gradient"."""

    name: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """The measurements of :func:`diagnose`; ``print`` shows them as text.

    layer: the layer as text. lengths: lengths of the output capsules, ``[B, J]``. coupling_entropy: mean entropy of
    each iteration; 1 is equal coupling. saturation: share of output capsules longer than 0.98. dead_outputs,
    dead_inputs: indices of capsules that take no part in any sample. margin_loss: its value. gradient_norms: norms of
    its gradients with respect to the input and the parameters, by name. findings: the problems found.
    """

    layer: str
    lengths: Tensor
    coupling_entropy: tuple[float, ...]
    saturation: float
    dead_outputs: tuple[int, ...]
    dead_inputs: tuple[int, ...]
    margin_loss: float
    gradient_norms: dict[str, float]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        norms = ", ".join(f"{name} {norm:.1e}" for name, norm in self.gradient_norms.items())
        low, high = self.lengths.aminmax()
        lines = [
            self.layer,
            f"  lengths           {low:.3g} to {high:.3g}, mean {self.lengths.mean():.3g}",
            f"  coupling entropy  {', '.join(f'{entropy:.3f}' for entropy in self.coupling_entropy)} (equal: 1)",
            f"  saturated         {self.saturation:.0%} of the output capsules",
            f"  dead              output capsules {_some(self.dead_outputs)}; input capsules {_some(self.dead_inputs)}",
            f"  margin loss       {self.margin_loss:.3g}; gradient norms: {norms}",
        ]
        if not self.findings:
            return "\n".join([*lines, "Nothing is wrong."])
        return "\n".join([*lines, *(f"{name}: {what} Remedy: {remedy}" for name, what, remedy in self.findings)])


def diagnose(layer: Layer | ConvCaps2d, u: Tensor, labels: Tensor | None = None, **given: Tensor) -> Diagnosis:
    """Runs the layer forward and backward on ``u`` and says what is wrong with it.

    It finds: numbers that are not finite; saturation, where the squash makes every capsule about 1 long and the
    gradient vanishes (``torch.randn`` weights); output capsules that are all too short to learn; output capsules that
    are never long or never coupled; input capsules that are zero; coupling that goes to one output for every sample; a
    gradient that is zero. The layer with its gradients and buffers is left unchanged.

    Args:
        layer: a routing layer, or a layer that :func:`capsfast.accelerate` replaced.
        u: the input of the layer: ``[B, I, K]``, an image of capsules for ConvCaps1d, 2d, 3d, votes for
            RoutingByAgreement.
            Give a few dozen samples of all classes, so that a dead capsule differs from an absent class.
        labels: int64, one for each row of the output, for the margin loss whose gradients are measured; by default
            0 … J-1 in turn.
        given: logits, mask, activation and so on, as in the layer's forward. If the routing needs activations and none
            are given, the lengths of u are used.

    Raises:
        TypeError: not a routing layer.
        ValueError: no sample, activations that do not depend on u, or any error of the layer.

    Example:
        >>> layer = capsfast.DynamicRouting(1152, 10, 8, 16)
        >>> _ = torch.nn.init.normal_(layer.W)  # as many layers start: too large
        >>> diagnosis = capsfast.diagnose(layer, capsfast.squash(torch.randn(32, 1152, 8)))
        >>> [finding.name for finding in diagnosis.findings]
        ['saturated']
    """
    op = "capsfast.diagnose"
    layer, u = as_capsfast(layer, u)
    if not isinstance(layer, (RoutedCaps, RoutingByAgreement, ConvCaps2d)):
        raise TypeError(
            f"{op}: layer must be a RoutedCaps (such as DynamicRouting), ConvCaps1d, 2d, 3d or "
            f"RoutingByAgreement, got "
            f"{type(layer).__name__}; of a model, take its part .routing"
        )
    if not isinstance(u, Tensor):
        raise TypeError(f"{op}: u must be a torch.Tensor, got {type(u).__name__}")
    text = f"{type(layer).__name__}({layer.extra_repr()})"
    if isinstance(layer, ConvCaps2d):
        layer, u, given = layer.as_connected(u, **given)
    routing = getattr(layer, "routing", layer)  # RoutingByAgreement, which takes votes, is its own routing
    name = next(iter(inspect.signature(layer.forward).parameters))
    softmax: Softmax = getattr(routing, "softmax", "out")
    with torch.enable_grad(), _buffers_kept(layer):
        leaf = u.detach().requires_grad_()
        activations = layer.capsules(leaf, **given).activations
        if activations.numel() == 0:
            raise ValueError(f"{op}: u must hold at least one sample, got {checks.shape_of(u)}")
        if not activations.requires_grad:
            raise ValueError(
                f"{op}: the activations of {text} must depend on u, got constants; with learned_readout=False "
                f"inverted-attention routing has none"
            )
        if labels is None:
            labels = torch.arange(activations.shape[0], device=u.device) % activations.shape[1]
        loss = MarginLoss()(activations, labels)
        leaves = {name: leaf} | {name: value for name, value in layer.named_parameters() if value.requires_grad}
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        coupling = _couplings(layer, u.detach(), softmax, given)
    lengths = activations.detach().float()
    entropy = CouplingEntropy(softmax)
    dead_outputs, dead_inputs = _dead(softmax, u, lengths, coupling[-1].float(), given)
    measured = Diagnosis(
        text,
        lengths,
        tuple(entropy(c.flatten(0, 1)).item() for c in coupling),
        (lengths > LONG).float().mean().item() if _squashes(routing) else 0.0,
        dead_outputs,
        dead_inputs,
        loss.item(),
        {name: torch.linalg.vector_norm(g.float()).item() for name, g in zip(leaves, gradients, strict=True)},
        (),
    )
    if not lengths.isfinite().all():
        return replace(measured, findings=(_not_finite(layer, u),))
    # The gradient of W, or of the votes if the layer has no W.
    flat = gradients[list(leaves).index("W") if "W" in leaves else 0].float().square().mean().sqrt().item()
    load = coupling[-1].float().mean((0, 2)) if softmax == "out" else None
    return replace(measured, findings=tuple(_findings(measured, flat, load)))


def _squashes(routing: nn.Module) -> bool:
    """Whether a length near 1 means that the squash is flat there."""
    return getattr(routing, "squash", None) in BOUNDED and getattr(routing, "squash_last", True)


@contextmanager
def _buffers_kept(layer: nn.Module) -> Iterator[None]:
    """Restores buffers that a forward call in training mode changes, such as the statistics of a batch norm."""
    before = [(buffer, buffer.clone()) for buffer in layer.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, kept in before:
                if not torch.equal(buffer, kept):  # writing would break a caller's autograd graph that holds the buffer
                    buffer.copy_(kept)


def _couplings(layer: Layer, u: Tensor, softmax: str, given: dict[str, Tensor]) -> list[Tensor]:
    """The coupling of each iteration, ``[B, groups, I / groups, J / groups]``."""
    with torch.no_grad():
        routed = routed_by_passes(layer, u, **given)
        shares = map(shares_of, routed.weights) if softmax == "out" else routed.weights
        return [c.unflatten(1, (routed.groups, -1)) for c in shares]


def _findings(measured: Diagnosis, gradient_rms: float, load: Tensor | None) -> Iterator[Finding]:
    """``load [groups, J / groups]``: the mean share of the coupling of each output capsule."""
    longest = measured.lengths.amax().item()
    if measured.saturation > 0.5:
        yield Finding(
            "saturated",
            f"{measured.saturation:.0%} of the output capsules are longer than {LONG}, where the squash is flat: the "
            f"margin loss is {measured.margin_loss:.3f} and the root mean square of its gradient {gradient_rms:.0e}, "
            f"so that training stands still.",
            "smaller weights (a smaller init_std; torch.randn is 1), or shorter input capsules; if training lengthened "
            "the capsules, a lower learning rate or more steps of warm-up.",
        )
    if longest < SHORT:
        yield Finding(
            "faded",
            f"no output capsule is longer than {longest:.1e}; the squash is flat at 0 too.",
            'a larger init_std, longer input capsules, or squash="half" or "exp".',
        )
    elif measured.dead_outputs:
        yield Finding(
            "dead outputs",
            f"the output capsules {_some(measured.dead_outputs)} stay below {DEAD_SHARE:.0%} of the longest or of an "
            f"equal share of the coupling in every sample.",
            "samples of all classes; if they stay dead, draw their weights anew and lower the learning rate.",
        )
    if measured.dead_inputs:
        yield Finding(
            "dead inputs",
            f"the input capsules {_some(measured.dead_inputs)} are zero in every sample.",
            "look at what makes them, such as a ReLU before the capsules that lets nothing through.",
        )
    if load is not None and load.shape[1] > 1 and load.amax().item() > COLLAPSED:
        yield Finding(
            "collapsed",
            f"{load.amax().item():.0%} of the coupling goes to output capsule {int(load.argmax())} in the mean of "
            f"all samples.",
            "fewer iterations, smaller weights or logits, or a term that rewards capsfast.nn.CouplingEntropy.",
        )
    without = [name for name, norm in measured.gradient_norms.items() if not 0 < norm < math.inf]
    if measured.margin_loss > 0 and without:
        yield Finding(
            "no gradient",
            f"the gradient of the margin loss is 0 or not finite for {', '.join(without)}.",
            "look for weights, inputs or masks that take everything out.",
        )


def _dead(
    softmax: str, u: Tensor, lengths: Tensor, c: Tensor, given: dict[str, Tensor]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Output and input capsules that take no part in any sample although no mask takes them out."""
    longest = lengths.amax(0)
    dead = longest < DEAD_SHARE * longest.amax()
    if softmax == "out":
        dead = dead | (c.amax((0, 2)) < DEAD_SHARE / c.shape[3]).flatten()
    if "out_mask" in given:
        dead = dead & given["out_mask"].any(0)
    absent = ~u.flatten(2).any(2).any(0)
    if "mask" in given:
        absent = absent & given["mask"].any(0)
    return tuple(dead.nonzero().flatten().tolist()), tuple(absent.nonzero().flatten().tolist())


def _not_finite(layer: Layer, u: Tensor) -> Finding:
    places = [name for name, value in layer.named_parameters() if not value.isfinite().all()]
    if not u.isfinite().all():
        places.append("the input")
    where = f"so are entries of {', '.join(places)}" if places else "though input and parameters are: sums overflow"
    return Finding(
        "not finite",
        f"output capsules hold NaN or infinity, {where}.",
        "find the step that made them (torch.autograd.detect_anomaly), lower the learning rate, clip gradients.",
    )


def _some(indices: tuple[int, ...]) -> str:
    """The indices as text, only the first eight if there are more."""
    if not indices:
        return "none"
    text = ", ".join(map(str, indices[:8]))
    return text if len(indices) <= 8 else f"{text}, … ({len(indices)} in all)"
