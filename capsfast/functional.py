"""The public functions of routing: they check the arguments and call the op."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import has_torch_function, has_torch_function_unary
from typing_extensions import Unpack

from .calls import arguments, checks, keywords
from .calls.arguments import GIVEN, Call, RoutingParameters
from .calls.options import (
    SQUASH,
    Backend,
    Gradient,
    OptionKeywords,
    Options,
    RoutingOptions,
    Softmax,
    Squash,
    checked_options,
)
from .calls.overrides import instead
from .ops import dynamic_routing as _dynamic_routing
from .ops import factored_routing as _factored_routing
from .reference.squash import squash as _squash

__all__ = ["dynamic_routing", "route_votes", "squash"]

# The names in messages.
ROUTING, VOTES = "capsfast.dynamic_routing", "capsfast.route_votes"


class RoutingKeywords(OptionKeywords, total=False):
    """The keywords of :func:`dynamic_routing` except return_coupling, for functions that pass them on."""

    logits: Tensor | None
    bias: Tensor | None
    mask: Tensor | None
    out_mask: Tensor | None
    backend: Backend | None


class CoupledKeywords(RoutingKeywords, total=False):
    """The same with return_coupling."""

    return_coupling: bool


def squash(s: Tensor, dim: int = -1, eps: float = 1e-8, kind: Squash = "paper") -> Tensor:
    """Shrinks the vectors along ``dim`` to a length below one: ``v = f(n) s`` with ``n = |s|^2``.

    Kinds, by their factor ``f(n)``:

    * ``"paper"``: ``n / (1 + n) / sqrt(n + eps)`` (Sabour et al. 2017, eq. 1)
    * ``"half"``: ``n / (0.5 + n) / sqrt(n + eps)``, steeper for short vectors
    * ``"eps_outside"``: ``n / (1 + n) / (sqrt(n) + eps)``, eps added to the norm
    * ``"exp"``: ``(1 - exp(-m)) / m`` with ``m = sqrt(n + eps)`` (Xi et al. 2017)
    * ``"unit"``: ``1 / sqrt(n + eps)``, plain normalisation
    * ``"identity"``: ``1``, no squash

    Args:
        s: any shape; float32, float64, bfloat16 or float16.
        dim: the axis that holds a capsule's components.
        eps: keeps the gradient of a zero vector finite; at least 1e-20, which in effect is no eps.
        kind: one of the names above.

    Returns:
        A tensor like ``s``. The factor of a 16-bit ``s`` is computed in float32.

    Raises:
        TypeError: ``s`` is not a dense floating-point tensor.
        ValueError: unknown kind, eps not positive.
        IndexError: ``dim`` out of range.
    """
    if has_torch_function_unary(s):
        return instead(squash, locals(), 4)  # type: ignore[no-any-return]
    op = "capsfast.squash"
    if not isinstance(s, Tensor):
        raise TypeError(f"{op}: s must be a torch.Tensor, got {type(s).__name__}")
    if s.layout != torch.strided:
        raise TypeError(f"{op}: s must be a dense tensor, got layout {s.layout}; call s.to_dense() first")
    checks.floating(op, "s", s)
    if type(dim) is not int or type(eps) is not float:
        dim, eps = checks.plain((dim, eps))
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"{op}: dim must be an int, got {checks.shown(dim)}")
    if not -s.dim() <= dim < s.dim():
        raise IndexError(f"{op}: dim must be in [{-s.dim()}, {s.dim() - 1}] for s {checks.shape_of(s)}, got {dim}")
    checks.choice(op, "kind", kind, SQUASH)
    checks.positive_eps(op, eps)
    return checks.in_memory(op, "take a smaller batch", _squash, s, dim, eps, kind)  # type: ignore[no-any-return]


@overload
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    return_coupling: Literal[False] = ...,
    **options: Unpack[RoutingKeywords],
) -> Tensor: ...


@overload
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    return_coupling: Literal[True],
    **options: Unpack[RoutingKeywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def dynamic_routing(
    u: Tensor, weight: Tensor, num_iterations: int = 3, *, return_coupling: bool, **options: Unpack[RoutingKeywords]
) -> Tensor | tuple[Tensor, Tensor]: ...


@keywords.closed
def dynamic_routing(
    u: Tensor,
    weight: Tensor,
    num_iterations: int = 3,
    *,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    out_mask: Tensor | None = None,
    softmax: Softmax = "out",
    gradient: Gradient = "full",
    leaky: bool = False,
    squash: Squash = "paper",
    eps: float = 1e-8,
    squash_last: bool = True,
    return_coupling: bool = False,
    backend: Backend | None = None,
    **unknown: Unpack[keywords.NoMore],
) -> Tensor | tuple[Tensor, Tensor]:
    """Routing by agreement from input capsules, without storing the votes.

    (On the CPU the votes of a batch of a few samples are stored, up to 128 MiB: see docs/cpu-kernels.md.)

    Equivalent to ``votes = einsum("ijdk,bik->bijd", weight, u)`` followed by ``num_iterations`` times
    ``c = softmax(b); s = einsum("bij,bijd->bjd", c, votes); v = squash(s);
    b = b + einsum("bijd,bjd->bij", votes, v)`` (Sabour, Frosst, Hinton 2017, procedure 1).

    Args:
        u: input capsules ``[B, I, K]``; float32, float64, bfloat16 or float16, any strides. Or pose matrices
            ``[B, I, P, Q]`` (Hinton et al. 2018), whose votes ``u_i W_ij`` are matrices ``[P, R]``: D = P R numbers
            each, row by row.
        weight: transformation matrices ``[I, J, D, K]``, for pose matrices ``[I, J, Q, R]``; same dtype as ``u``,
            except under autocast. Size 1 for I shares the matrices between the input capsules, size 1 for J between
            the output capsules, without a copy. With size 1 for J, logits, bias or out_mask give the number of output
            capsules, if one of them is passed; the votes then have no axis J and are stored, in float32 for 16-bit
            inputs. If one matrix serves all pairs and this is less work, the CPU forms no votes (docs/recommenders.md).
        num_iterations: how many weighted sums are formed, at least 1.
        logits: log prior of the coupling, ``[I, J]`` (learned) or ``[B, I, J]``; default 0.
        bias: ``[J, D]``, added to the weighted sum before the squash.
        mask: ``[B, I]`` bool; False takes an input capsule out, whatever it holds.
        out_mask: ``[B, J]`` bool; False takes an output capsule out: no coupling, ``v = 0``.
        softmax: ``"out"`` normalises over the output capsules (the paper), ``"in"`` over the inputs.
        gradient: ``"full"``: through all iterations; ``"last"``: the agreement added to the logits counts as constant.
        leaky: adds an entry with logit 0 to every softmax, whose coupling is thrown away.
        squash: a kind of :func:`capsfast.squash`.
        eps: eps of the squash, at least 1e-20, which reproduces layers without an eps.
        squash_last: False: no squash in the last iteration; the result is the last weighted sum plus bias.
        return_coupling: also return the last coupling coefficients.
        backend: a name in :func:`capsfast.backends`; default: the first available one that serves the call.

    Returns:
        ``v [B, J, D]`` in the dtype of ``u``; with ``return_coupling`` the pair of ``v`` and
        ``c [B, I, J]``. Sums are formed in float32 for 16-bit inputs. Empty sums are 0.

    Raises:
        ValueError: a shape, a value or a device does not fit.
        TypeError: not a dense floating-point tensor, or dtypes that differ.
        RuntimeError: the demanded backend cannot serve the call; a second or a forward-mode derivative of a fused
            backend.

    Example:
        >>> u, weight = torch.randn(16, 1152, 8), 0.1 * torch.randn(1152, 10, 16, 8)
        >>> v, coupling = capsfast.dynamic_routing(u, weight, num_iterations=3, return_coupling=True)
        >>> v.shape, coupling.shape
        (torch.Size([16, 10, 16]), torch.Size([16, 1152, 10]))
    """
    if unknown:
        keywords.refuse(dynamic_routing, unknown)
    if has_torch_function((u, weight, logits, bias, mask, out_mask)):
        return instead(dynamic_routing, locals(), 3)  # type: ignore[no-any-return]
    options = checked_options(ROUTING, num_iterations, softmax, gradient, leaky, squash, eps, squash_last)
    if type(return_coupling) is not bool:
        checks.boolean(ROUTING, "return_coupling", return_coupling)
    parameters = RoutingParameters(logits, bias, mask, out_mask)
    return _routed(ROUTING, u, weight, parameters, options, return_coupling, backend)


def _routed(
    op: str,
    u: Tensor,
    weight: Any,
    parameters: RoutingParameters,
    options: RoutingOptions,
    return_coupling: bool,
    backend: Backend | None,
) -> Tensor | tuple[Tensor, Tensor]:
    call, restore = arguments.check(op, u, weight, parameters, options)
    v, c = _dynamic_routing.run(call, return_coupling, backend)
    if restore is not None:
        v, c = restore(v), restore(c) if return_coupling else c
    return (v, c) if return_coupling else v


def agree(
    u: Tensor,
    weight: Tensor | None,
    options: RoutingOptions,
    *,
    logits: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    out_mask: Tensor | None = None,
    return_coupling: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`dynamic_routing` with all options of the op, already checked; without a weight u are votes."""
    if has_torch_function((u, weight, logits, bias, mask, out_mask)):
        return instead(agree, locals(), 3)  # type: ignore[no-any-return]
    op, weight = (VOTES, GIVEN) if weight is None else (ROUTING, weight)
    return _routed(op, u, weight, RoutingParameters(logits, bias, mask, out_mask), options, return_coupling, backend)


def routed(
    call: Call, options: RoutingOptions, parameters: RoutingParameters, return_coupling: bool, backend: Backend | None
) -> tuple[Tensor, Tensor]:
    """``(v, c)`` of a checked product or of checked votes, and parameters that are checked too; c may be empty."""
    op = VOTES if call.weight is None else ROUTING
    return _dynamic_routing.run(
        Call(op, call.u, call.weight, parameters, options, call.J, call.D, call.P), return_coupling, backend
    )


def factored(call: Call, backend: Backend | None) -> Tensor | None:
    """v of a call with a weight that all input capsules share, without votes; None if that does not serve the call.

    Other than :func:`dynamic_routing`, logits need not accumulate.
    """
    return _factored_routing.run(call)[0] if _factored_routing.serves(call, backend) else None


@overload
def route_votes(
    votes: Tensor, num_iterations: int = 3, *, return_coupling: Literal[False] = ..., **options: Unpack[RoutingKeywords]
) -> Tensor: ...


@overload
def route_votes(
    votes: Tensor, num_iterations: int = 3, *, return_coupling: Literal[True], **options: Unpack[RoutingKeywords]
) -> tuple[Tensor, Tensor]: ...


@overload
def route_votes(
    votes: Tensor, num_iterations: int = 3, *, return_coupling: bool, **options: Unpack[RoutingKeywords]
) -> Tensor | tuple[Tensor, Tensor]: ...


@keywords.with_keywords_of(dynamic_routing)
def route_votes(
    votes: Tensor, num_iterations: int = 3, **options: Unpack[CoupledKeywords]
) -> Tensor | tuple[Tensor, Tensor]:
    """Routing by agreement over votes that already exist, read in place.

    Args:
        votes: ``[B, I, J, D]``; float32, float64, bfloat16 or float16, any strides. Size 1 for J shares them between
            the output capsules; logits, bias or out_mask then say how many there are. Votes ``[B, I, J, D, *spatial]``,
            as a convolution makes them, are routed independently at every position, and the results end in the same
            axes of positions. An argument with an axis B may end in these axes too; otherwise it applies to every
            position.

    All other arguments, the result and the errors are as in :func:`capsfast.dynamic_routing`
    (Sabour, Frosst, Hinton 2017, procedure 1).

    Example:
        >>> votes = torch.randn(16, 32, 10, 8)
        >>> capsfast.route_votes(votes, num_iterations=2).shape
        torch.Size([16, 10, 8])
    """
    keywords.check(route_votes, options, CoupledKeywords)
    if has_torch_function((votes, num_iterations, *options.values())):
        return instead(route_votes, {"votes": votes, "num_iterations": num_iterations, **options}, 2)  # type: ignore[no-any-return]
    if isinstance(num_iterations, Tensor) and num_iterations.dim() > 1:
        raise TypeError(
            f"capsfast.route_votes: takes votes [B, I, J, D] and a number of iterations, got {checks.shown(votes)} and "
            f"{checks.shown(num_iterations)}; for u and a weight use capsfast.dynamic_routing"
        )
    rest: dict[str, Any] = {**options}
    parameters = RoutingParameters(*[rest.pop(name, None) for name in RoutingParameters._fields])
    return_coupling, backend = rest.pop("return_coupling", False), rest.pop("backend", None)
    checked = Options(num_iterations, **rest).checked(VOTES)
    checks.boolean(VOTES, "return_coupling", return_coupling)
    return _routed(VOTES, votes, GIVEN, parameters, checked, return_coupling, backend)
