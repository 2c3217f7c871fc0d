"""What making the votes in the kernels would gain, where a layer is given votes that are in memory."""

import torch
from torch import nn

from ..bench.timing import interleave
from ..functional import dynamic_routing
from .discovery import axes_of
from .identification import Identification
from .orders import follow, steps_to
from .verification import LEAST_ROUNDS, Given, Way


def maker(model: nn.Module, layer: nn.Module, sizes: tuple[int, int, int]) -> tuple[str, int] | None:
    """Name of the parameter outside of the layer that has the sizes of a weight which makes such votes, and its K."""
    I, J, D = sizes
    own = set(layer.parameters())
    for name, p in model.named_parameters():
        K, rest = divmod(p.numel(), I * J * D)
        if p in own or rest or not K:
            continue
        for parts in ([I, J, D], [I, J * D]):
            lengths = sorted(axes_of(tuple(p.shape)))
            if lengths == sorted(axes_of((*parts, K))):
                return name, K
    return None


def gain(
    model: nn.Module, layer: nn.Module, identification: Identification, given: Given, own: Way, seconds: float
) -> str:
    """A sentence, or nothing where the layer makes the votes itself or no weight for them is seen.

    Measured are forward and backward: einsum and the layer's own forward, and in their place one call of capsfast.
    """
    if identification.weight is not None:
        return ""
    I, J, D = identification.sizes[:3]
    found = maker(model, layer, (I, J, D))
    if found is None:
        return ""
    name, K = found
    votes, *others = given
    B = votes.shape[0]
    generator = torch.Generator().manual_seed(K)
    u = torch.randn(B, I, K, generator=generator).to(votes).requires_grad_()
    weight = (0.1 * torch.randn(I, J, D, K, generator=generator)).to(votes).requires_grad_()
    steps = steps_to(identification.input_order, "BIJD")
    # Masks and logits too, as the layer is given them.
    with torch.no_grad():
        _, keywords = identification.arguments_of_call(identification.tensors(layer), *given)

    def apart(_: int) -> None:
        made = follow(torch.einsum("ijdk,bik->bijd", weight, u), steps)
        torch.autograd.grad(own.at((made, *others)).sum(), (u, weight))

    def together(_: int) -> None:
        v = dynamic_routing(u, weight, **keywords)
        torch.autograd.grad(v.sum(), (u, weight))

    with torch.enable_grad():
        timings = interleave({"apart": apart, "together": together}, votes.device, seconds, LEAST_ROUNDS)
    before, after = timings["apart"].median, timings["together"].median
    return (
        f"its votes are in memory, where `{name}` has the size of the weight that makes them: one "
        f"capsfast.DynamicRouting({I}, {J}, {K}, {D}) for both would take {1e3 * after:.3g} ms where votes by einsum "
        f"and this layer's own forward take {1e3 * before:.3g} ms, forward and backward ({before / after:.1f}x)"
    )
