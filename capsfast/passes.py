"""The routing pass, public: check the arguments, then call the op."""

from typing import NamedTuple

from torch import Tensor
from torch.overrides import has_torch_function
from typing_extensions import Unpack

from . import _keywords, checks, positions
from ._overrides import instead
from .ops import routing_pass as _routing_pass
from .ops import votes_pass as _votes_pass
from .ops._product import width
from .options import PassOptions
from .reference.votes_pass import PassParameters

__all__ = ["Moments", "routing_pass", "votes_pass"]


class Moments(NamedTuple):
    """What a routing pass adds up over the input capsules, in the dtype that sums are formed in.

    That is float32 for 16-bit inputs, else their dtype; ``weights`` has the dtype of the inputs.

    ``mass [B, J]`` is ``sum_i r``, ``first [B, J, D]`` is ``sum_i r x``, and where they were asked for
    ``second [B, J, D]`` is ``sum_i r x^2``, ``weights [B, I, J]`` are r, and ``lse [B, I]``, for ``normalize="in"``
    ``[B, J]``, is the log-sum-exp of the logits.
    """

    mass: Tensor
    first: Tensor
    second: Tensor | None = None
    weights: Tensor | None = None
    lse: Tensor | None = None


@_keywords.closed
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
    normalize: str = "out",
    lse: Tensor | None = None,
    leaky: bool = False,
    second: bool = False,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Unpack[_keywords.NoMore],
) -> Moments:
    """One pass over the input capsules: what every routing does between two updates of its output capsules.

    With the votes ``W_ij u_i`` taken about a center, ``x_ij = W_ij u_i - center_j``::

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
        weight: transformation matrices ``[I, J, D, K]``; for pose matrices ``[I, J, Q, R]``. A size 1 for I or for J
            shares them without a copy. With size 1 for J the number of output capsules is that of query, precision,
            center, prior, logits or out_mask, and the votes, which then have no axis J, are in memory, in float32 for
            16 bits.
        query: ``[B, J, D]``, the linear part of the score.
        precision: ``[B, J, D]``, not negative: the quadratic part.
        center: ``[B, J, D]``, subtracted from the votes. About a mean, float32 does not cancel in ``second``.
        prior: ``[B, J]``, added to the logits.
        logits: ``[I, J]`` or ``[B, I, J]``, added to the logits.
        activation: ``[B, I]``, multiplies the coupling of an input capsule.
        mask: ``[B, I]`` bool; False takes an input capsule out, whatever it holds.
        out_mask: ``[B, J]`` bool; False takes an output capsule out: no coupling, moments 0.
        normalize: ``"out"``, ``"in"``: softmax over the output or over the input capsules. ``"sigmoid"``: of every
            logit. ``"lse"``: ``exp(logit - lse)``. ``"none"``: the logit is the coupling.
        lse: ``[B, I]``, the log-sum-exp that ``normalize="lse"`` needs.
        leaky: one more entry of logit 0 in every softmax, whose coupling is thrown away.
        second: also return the second moments.
        return_weights: also return r, ``[B, I, J]``.
        return_lse: also return the log-sum-exp of the softmax: ``[B, I]``, for ``normalize="in"`` ``[B, J]``; -inf
            where there is no finite logit.
        backend: a name in :func:`capsfast.backends`; default the fastest that serves the call.

    Returns:
        :class:`Moments`, with None for what was not asked for. Empty sums are 0.

    Raises:
        ValueError: a shape, a value or a device does not fit. A negative precision is seen on the CPU only, where
            looking costs no synchronisation; elsewhere the score is what the formula gives.
        TypeError: not a dense floating-point tensor, or dtypes that differ.
        RuntimeError: the demanded backend cannot serve the call; a second derivative of a fused backend.
    """
    if unknown:
        _keywords.refuse("capsfast.routing_pass", routing_pass, unknown)
    if has_torch_function((u, weight, query, precision, center, prior, logits, activation, mask, out_mask, lse)):
        return instead(routing_pass, locals(), 2)  # type: ignore[no-any-return]
    op = "capsfast.routing_pass"
    u, weight = checks.product(op, u, weight)
    options = _options(op, normalize, leaky, second, lse, return_weights, return_lse)
    parameters = PassParameters(query, precision, center, prior, logits, activation, lse, mask, out_mask)
    B, I, _ = u.shape
    J = checks.outputs(op, "weight", weight, 1, {name: getattr(parameters, name) for name in _SAY_J})
    checks.parameters(op, "u", u, (B, I, J, width(u, weight)), parameters._asdict())
    found = _routing_pass.call(u, weight, parameters, J, options, return_weights, return_lse, backend)
    return _moments(found, options, return_weights, return_lse)


@_keywords.closed
def votes_pass(
    votes: Tensor,
    *,
    query: Tensor | None = None,
    precision: Tensor | None = None,
    center: Tensor | None = None,
    prior: Tensor | None = None,
    logits: Tensor | None = None,
    activation: Tensor | None = None,
    mask: Tensor | None = None,
    out_mask: Tensor | None = None,
    normalize: str = "out",
    lse: Tensor | None = None,
    leaky: bool = False,
    second: bool = False,
    return_weights: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **unknown: Unpack[_keywords.NoMore],
) -> Moments:
    """A routing pass over votes that already exist, read in place.

    Args:
        votes: ``[B, I, J, D]``; float32, float64, bfloat16 or float16, any strides. A size 1 for J shares them between
            the output capsules, whose number is then that of the other arguments. Votes ``[B, I, J, D, *spatial]``, as
            a convolution leaves them, are routed at every position for itself. The results then end in the axes of
            positions too; an argument with an axis B may end in them, else it holds at every position.

    All other arguments, the result and the errors are those of :func:`capsfast.routing_pass`.
    """
    if unknown:
        _keywords.refuse("capsfast.votes_pass", votes_pass, unknown)
    if has_torch_function((votes, query, precision, center, prior, logits, activation, mask, out_mask, lse)):
        return instead(votes_pass, locals(), 1)  # type: ignore[no-any-return]
    op = "capsfast.votes_pass"
    votes, spatial = checks.votes(op, votes)
    options = _options(op, normalize, leaky, second, lse, return_weights, return_lse)
    parameters = PassParameters(query, precision, center, prior, logits, activation, lse, mask, out_mask)
    B, I, _, D = votes.shape[:4]
    J = checks.outputs(op, "votes", votes, 2, {name: getattr(parameters, name) for name in _SAY_J})
    checks.parameters(op, "votes", votes, (B, I, J, D), parameters._asdict(), spatial)
    if spatial:
        votes = positions.of_votes(votes, J, spatial)
        given = parameters._asdict()
        parameters = PassParameters(**{name: positions.spread(name, given[name], spatial) for name in given})
    found = _votes_pass.call(votes, parameters, J, options, return_weights, return_lse, backend)
    moments = _moments(found, options, return_weights, return_lse)
    restored = {
        name: positions.restore(value, spatial) for name, value in moments._asdict().items() if value is not None
    }
    return moments._replace(**restored)


_SAY_J = ("query", "precision", "center", "prior", "logits", "out_mask")


def _options(
    op: str,
    normalize: str,
    leaky: bool,
    second: bool,
    lse: Tensor | None,
    return_weights: bool,
    return_lse: bool,
) -> PassOptions:
    options = PassOptions(normalize, leaky, second)
    checks.pass_options(op, options)
    checks.boolean(op, "return_weights", return_weights)
    checks.boolean(op, "return_lse", return_lse)
    if (lse is not None) != (normalize == "lse"):
        got = "none" if lse is None else f"one with normalize={normalize!r}"
        raise ValueError(f'{op}: lse must be given for normalize="lse" and for no other, got {got}')
    if return_lse and normalize not in ("out", "in"):
        raise ValueError(
            f'{op}: return_lse needs a softmax, normalize="out" or "in", whose log-sum-exp it is, got {normalize!r}'
        )
    return options


def _moments(found: tuple[Tensor, ...], options: PassOptions, weights: bool, lse: bool) -> Moments:
    mass, first, second, r, log_sum = found
    return Moments(mass, first, second if options.second else None, r if weights else None, log_sum if lse else None)
