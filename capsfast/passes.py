"""The public routing passes: they check the arguments and call the op."""

from collections.abc import Callable
from typing import Any, TypedDict

from torch import Tensor
from torch.overrides import has_torch_function
from typing_extensions import Unpack

from .calls import arguments, checks, keywords
from .calls.arguments import GIVEN, Call, PassParameters
from .calls.options import Backend, EMOptions, Normalize, PassOptions
from .calls.overrides import instead
from .ops import em_routing as _em_routing
from .ops import em_update as _em_update
from .ops import routing_pass as _routing_pass
from .reference.routing_pass import Moments

__all__ = ["Moments", "routing_pass", "votes_pass"]

# The update of EM routing, for capsfast.nn.
em_update = _em_update.call

# The names in messages.
ROUTING, VOTES = "capsfast.routing_pass", "capsfast.votes_pass"


class PassKeywords(TypedDict, total=False):
    """The keywords of :func:`routing_pass`, for functions that pass them on."""

    query: Tensor | None
    precision: Tensor | None
    center: Tensor | None
    prior: Tensor | None
    logits: Tensor | None
    activation: Tensor | None
    mask: Tensor | None
    out_mask: Tensor | None
    normalize: Normalize
    lse: Tensor | None
    leaky: bool
    second: bool
    return_weights: bool
    return_lse: bool
    backend: Backend | None


@keywords.closed
def routing_pass(
    u: Tensor,
    weight: Tensor,
    *,
    query: Tensor | None = None,
    precision: Tensor | None = None,
    center: Tensor | None = None,
    prior: Tensor | None = None,
    logits: Tensor | None = None,
    activation: Tensor | None = None,
    mask: Tensor | None = None,
    out_mask: Tensor | None = None,
    normalize: Normalize = "out",
    lse: Tensor | None = None,
    leaky: bool = False,
    second: bool = False,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: Backend | None = None,
    **unknown: Unpack[keywords.NoMore],
) -> Moments:
    """One pass over the input capsules: the sums that every routing forms between two updates of its output capsules.

    With votes relative to a center, ``x_ij = W_ij u_i - center_j``::

        logit_ij = logits_ij + prior_j + x_ij . query_j - 1/2 sum_d precision_jd x_ijd^2
        r_ij     = normalize(logit)_ij * activation_i
        mass_j = sum_i r_ij     first_j = sum_i r_ij x_ij     second_j = sum_i r_ij x_ij^2

    Neither votes nor coupling coefficients r are written to memory, and every float argument has a gradient.
    docs/published-routings.md writes routings with it: Sabour et al. 2017 (dynamic), Hinton et al. 2018 (EM), Tsai et
    al. 2020 (inverted dot-product attention) and others.

    Args:
        u: input capsules ``[B, I, K]``; float32, float64, bfloat16 or float16, any strides. Or pose matrices
            ``[B, I, P, Q]`` (Hinton et al. 2018), whose votes ``u_i W_ij`` are matrices ``[P, R]``: D = P R numbers
            each, row by row.
        weight: transformation matrices ``[I, J, D, K]``; for pose matrices ``[I, J, Q, R]``. Size 1 for I or for J
            shares the matrices without a copy. With size 1 for J, query, precision, center, prior, logits or out_mask
            say how many output capsules there are; the votes then have no axis J and are stored, in float32 for 16-bit
            inputs.
        query: ``[B, J, D]``, the linear part of the score.
        precision: ``[B, J, D]``, not negative: the quadratic part of the score.
        center: ``[B, J, D]``, subtracted from the votes. A center near the mean avoids cancellation in ``second``.
        prior: ``[B, J]``, added to the logits.
        logits: ``[I, J]`` or ``[B, I, J]``, added to the logits.
        activation: ``[B, I]``, multiplies the coupling of an input capsule.
        mask: ``[B, I]`` bool; False takes an input capsule out, whatever it holds.
        out_mask: ``[B, J]`` bool; False takes an output capsule out: no coupling, moments 0.
        normalize: how logits become coupling. ``"out"``, ``"in"``: a softmax over the output or the input capsules.
            ``"sigmoid"``: a sigmoid of each logit. ``"lse"``: ``exp(logit - lse)``. ``"none"``: the logit itself.
        lse: ``[B, I]``, the log-sum-exp that ``normalize="lse"`` needs.
        leaky: adds an entry with logit 0 to every softmax, whose coupling is thrown away.
        second: also return the second moments.
        return_weights: also return r, ``[B, I, J]``.
        return_lse: also return the log-sum-exp of the softmax: ``[B, I]``, for ``normalize="in"`` ``[B, J]``; -inf
            where there is no finite logit.
        backend: a name in :func:`capsfast.backends`; default: the first available one that serves the call.

    Returns:
        :class:`Moments`, with None for moments that were not requested. Empty sums are 0.

    Raises:
        ValueError: a shape, a value or a device does not fit. A negative precision is an error on the CPU only, where
            the check needs no synchronisation.
        TypeError: not a dense floating-point tensor, or dtypes that differ.
        RuntimeError: the demanded backend cannot serve the call; a second derivative of a fused backend.

    Example:
        >>> u, weight = torch.randn(16, 1152, 8), 0.1 * torch.randn(1152, 10, 16, 8)
        >>> pose = capsfast.routing_pass(u, weight).first  # without a query all coupling coefficients are equal
        >>> moments = capsfast.routing_pass(u, weight, query=pose)
        >>> moments.mass.shape, moments.first.shape
        (torch.Size([16, 10]), torch.Size([16, 10, 16]))
    """
    if unknown:
        keywords.refuse(routing_pass, unknown)
    if has_torch_function((u, weight, query, precision, center, prior, logits, activation, mask, out_mask, lse)):
        return instead(routing_pass, locals(), 2)  # type: ignore[no-any-return]
    parameters = PassParameters(query, precision, center, prior, logits, activation, lse, mask, out_mask)
    options = PassOptions(normalize, leaky, second)
    return _passed(ROUTING, u, weight, parameters, options, return_weights, return_lse, backend)


def _passed(
    op: str,
    u: Tensor,
    weight: Any,
    parameters: PassParameters,
    options: PassOptions,
    return_weights: bool,
    return_lse: bool,
    backend: Backend | None,
) -> Moments:
    options.check(op)
    _check_lse(op, options.normalize, parameters.lse, return_weights, return_lse)
    call, restore = arguments.check(op, u, weight, parameters, options, J_needed=True)
    mass, first, squares, r, log_sum = _routing_pass.run(call, return_weights, return_lse, backend)
    second = squares if options.second else None
    asked = (mass, first, second, r if return_weights else None, log_sum if return_lse else None)
    if restore is not None:
        return Moments(*[value if value is None else restore(value) for value in asked])  # type: ignore[arg-type]
    return Moments(*asked)


@keywords.with_keywords_of(routing_pass)
def votes_pass(votes: Tensor, **options: Unpack[PassKeywords]) -> Moments:
    """A routing pass over votes that already exist, read in place.

    Args:
        votes: ``[B, I, J, D]``; float32, float64, bfloat16 or float16, any strides. Size 1 for J shares them between
            the output capsules; the other arguments then say how many there are. Votes ``[B, I, J, D, *spatial]``, as a
            convolution makes them, are routed independently at every position, and the results end in the same axes of
            positions. An argument with an axis B may end in these axes too; otherwise it applies to every position.

    All other arguments, the result and the errors are as in :func:`capsfast.routing_pass`.
    """
    keywords.check(votes_pass, options, PassKeywords)
    if has_torch_function((votes, *options.values())):
        return instead(votes_pass, {"votes": votes, **options}, 1)  # type: ignore[no-any-return]
    rest: dict[str, Any] = {**options}
    parameters = PassParameters(*[rest.pop(name, None) for name in PassParameters._fields])
    passed = PassOptions(rest.pop("normalize", "out"), rest.pop("leaky", False), rest.pop("second", False))
    requests = (rest.pop("return_weights", False), rest.pop("return_lse", False))
    return _passed(VOTES, votes, GIVEN, parameters, passed, *requests, rest.pop("backend", None))


def gaussians(
    call: Call,
    betas: tuple[Tensor, Tensor],
    inverse_temperatures: tuple[float, ...],
    update: EMOptions,
    stride: Callable[[], int],
    backend: Backend | None,
) -> tuple[Tensor, Tensor] | None:
    """All passes and updates of EM routing as one op, ``(poses, activations)``; None if no backend has it for the call.

    Args:
        call: checked, as a pass with second moments.
        betas: beta_a and beta_u, ``[J]``.
        inverse_temperatures: of each iteration. update: what follows a pass, with any inverse temperature.
        stride: says of how many input capsules one has a part in the first center, which may read the activations.
    """
    chosen = _em_routing.backend_of(call, betas, backend)
    return None if chosen is None else _em_routing.run(call, betas, inverse_temperatures, update, stride(), chosen)


def _check_lse(op: str, normalize: str, lse: Tensor | None, return_weights: bool, return_lse: bool) -> None:
    if type(return_weights) is not bool or type(return_lse) is not bool:
        checks.boolean(op, "return_weights", return_weights)
        checks.boolean(op, "return_lse", return_lse)
    if (lse is not None) != (normalize == "lse"):
        got = "none" if lse is None else f"one with normalize={normalize!r}"
        raise ValueError(f'{op}: lse must be given for normalize="lse" and for no other, got {got}')
    if return_lse and normalize not in ("out", "in"):
        raise ValueError(
            f'{op}: return_lse needs a softmax, normalize="out" or "in", whose log-sum-exp it is, got {normalize!r}'
        )
