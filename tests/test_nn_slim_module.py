"""Slim convolutional capsules as modules: what they write to memory, copies, text, wrong arguments."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from capsfast import native
from capsfast.nn import (
    SlimConvCaps2d,
    SlimConvCaps3d,
    SlimConvTransposeCaps2d,
    SlimConvTransposeCaps3d,
)

from .test_nn_slim_caps import (
    WINDOWS,
    B,
    D,
    I,
    J,
    K,
    Weighted,
    each_of_votes,
)


class Stored(TorchDispatchMode):
    """How many numbers each operation of the block has written to memory that was not among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, Any] = {}  # kept, so that no address is used again
        self.numel: list[tuple[int, str]] = []

    def _new(self, values: Any) -> Iterator[Tensor]:
        for each in tree_leaves(values):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in self.seen:
                self.seen[each.untyped_storage().data_ptr()] = each.untyped_storage()
                yield each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        list(self._new((args, kwargs)))
        found = func(*args, **(kwargs or {}))
        for each in self._new(found):
            self.numel.append((each.untyped_storage().nbytes() // each.element_size(), str(func)))
        return found

    def larger_than(self, numel: float) -> list[str]:
        return [name for size, name in self.numel if size > numel]


@pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")
@pytest.mark.parametrize("window", ["2d", "2d own kernels", "3d", "up", "up 3d"])
def test_votes_are_in_memory_once(window: str) -> None:
    """Beside them less than a twentieth, and in backward their gradient once; with positions behind or before types."""
    kind, given, _ = WINDOWS[window]
    layer = kind(30, J, K, D, **given)
    axes = layer.conv.weight.dim() - 2
    forms = [torch.contiguous_format]
    if layer.shared:  # for kernels of their own, types are joined to the channels, which copies the poses
        forms.append(torch.channels_last if axes == 2 else torch.channels_last_3d)
    for form in forms:
        maps = torch.randn(2 * 30, K, *(9, 8, 7)[:axes]).contiguous(memory_format=form)
        poses = maps.unflatten(0, (2, 30)).requires_grad_()
        with Stored() as forward:
            v = layer(poses)
        votes = 30 * v.numel()
        conv, *more = forward.larger_than(votes / 20)
        assert "convolution" in conv and not more
        assert sum(size for size, _ in forward.numel) < 1.05 * votes
        with Stored() as backward:
            v.sum().backward()
        own = [each for each in backward.larger_than(votes / 20) if "convolution" not in each]
        assert len(own) == 1 and "dynamic_routing_backward" in own[0]


@each_of_votes
def test_every_routing_reads_the_votes_in_place(name: str) -> None:
    layer = SlimConvCaps2d(30, J, K, D, routing=name)
    poses, activation = torch.randn(2, 30, K, 9, 8), torch.rand(2, 30, 9, 8)
    with Stored() as stored, torch.no_grad():
        layer(poses, None if name == "dynamic" else activation)
    conv, *more = stored.larger_than(2 * 30 * J * D * 7 * 6 / 4)
    assert "convolution" in conv and not more


def test_starts_with_poses_of_about_the_same_length() -> None:
    torch.manual_seed(0)
    for layer in (
        SlimConvCaps2d(6, 5, 8, 16, 3, padding=1, squash="identity", num_iterations=1),
        SlimConvCaps2d(6, 5, 8, 16, 3, padding=1, squash="identity", num_iterations=1, softmax="in"),
        SlimConvCaps3d(6, 5, 8, 16, 3, padding=1, squash="identity", num_iterations=1),
        SlimConvTransposeCaps2d(6, 5, 8, 16, squash="identity", num_iterations=1),
    ):
        poses = torch.randn(2, 6, 8, *(6,) * (layer.conv.weight.dim() - 2))
        before, after = (torch.linalg.vector_norm(each, dim=2).mean() for each in (poses, layer(poses)))
        assert 1 < after / before < 3


def test_text_and_state() -> None:
    layer = SlimConvCaps2d(I, J, K, D, (3, 2), 2, bias=True, learned_logits=True, softmax="everywhere", shared=False)
    assert "3, 4, 3, 5, kernel_size=(3, 2), stride=(2, 2), softmax='everywhere', shared=False" in repr(layer)
    assert "num_iterations=3, learned_logits=True, bias=True" in repr(layer)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "conv.weight": (I * J * D, K, 3, 2),
        "routing.logits": (I, J),
        "routing.bias": (J, D),
    }
    assert layer.routing.bias.tolist() == [[pytest.approx(0.1)] * D] * J
    assert SlimConvTransposeCaps2d(I, J, K, D).conv.weight.shape == (K, J * D, 4, 4)
    assert sum(each.numel() for each in SlimConvCaps3d(I, J, K, D).parameters()) == J * D * K * 27


CALLS: dict[str, tuple[Any, type[Exception], str]] = {
    "types": (lambda: SlimConvCaps2d(0, J, K, D), ValueError, "SlimConvCaps2d: in_types must be at least 1, got 0"),
    "kernel": (
        lambda: SlimConvCaps3d(I, J, K, D, (3, 3)),
        TypeError,
        r"SlimConvCaps3d: kernel_size must be an int or three of them, got \(3, 3\)",
    ),
    "stride": (lambda: SlimConvCaps2d(I, J, K, D, 3, 0), ValueError, "stride must be at least 1, got 0"),
    "shared": (lambda: SlimConvCaps2d(I, J, K, D, shared=1), TypeError, "shared must be True or False, got 1"),
    "option": (
        lambda: SlimConvCaps2d(I, J, K, D, 3, groups=2),
        TypeError,
        "SlimConvCaps2d: routing dynamic has no option groups; it has num_iterations, learned_logits",
    ),
    "no inputs": (
        lambda: SlimConvTransposeCaps3d(I, J, K, D, routing="self"),
        ValueError,
        "SlimConvTransposeCaps3d: routing must make do with votes, .* got self, which looks at the input capsules too",
    ),
    "routing": (lambda: SlimConvCaps2d(I, J, K, D, routing="no"), ValueError, "SlimConvCaps2d: routing must be one of"),
    "softmax": (lambda: SlimConvCaps2d(I, J, K, D, softmax="no"), ValueError, "SlimConvCaps2d: softmax must be one of"),
    "init_std": (lambda: SlimConvCaps2d(I, J, K, D, init_std=0.0), ValueError, "init_std must be positive"),
    "more than a stride": (
        lambda: SlimConvTransposeCaps2d(I, J, K, D, output_padding=2),
        ValueError,
        "output_padding must be smaller than stride or dilation",
    ),
    "rank": (
        lambda: SlimConvCaps3d(I, J, K, D)(torch.zeros(B, I, K, 4, 4)),
        ValueError,
        r"poses must have shape \[B, in_types, in_dim, Z, H, W\], got \[2, 3, 3, 4, 4\]",
    ),
    "sizes": (
        lambda: SlimConvCaps2d(I, J, K, D)(torch.zeros(B, K + 1, K, 4, 4)),
        ValueError,
        r"poses must be \[B, in_types=3, in_dim=3, H, W\], got \[2, 4, 3, 4, 4\]",
    ),
    "ints": (
        lambda: SlimConvCaps2d(I, J, K, D)(torch.zeros(B, I, K, 4, 4, dtype=torch.int64)),
        TypeError,
        "poses must be float32",
    ),
    "small": (
        lambda: SlimConvCaps3d(I, J, K, D)(torch.zeros(B, I, K, 4, 2, 4)),
        ValueError,
        r"a window of 3 x 3 x 3 \(dilation 1 x 1 x 1\) must fit .* got 4 x 2 x 4 with padding 0 x 0 x 0",
    ),
    "nothing left": (
        lambda: SlimConvTransposeCaps2d(I, J, K, D, 2, padding=1)(torch.zeros(B, I, K, 1, 4)),
        ValueError,
        "the output must have at least one position, got 0 x 6 for 1 x 4; use a smaller padding",
    ),
    "size": (
        lambda: SlimConvTransposeCaps2d(I, J, K, D)(torch.zeros(B, I, K, 4, 4), size=(8, 10)),
        ValueError,
        r"size must be at least \[8, 8\] and less than a stride of \(2, 2\) larger, got \(8, 10\)",
    ),
    "activation": (
        lambda: SlimConvCaps2d(I, J, K, D)(torch.zeros(B, I, K, 4, 4), torch.zeros(B, I, 4, 4)),
        ValueError,
        "dynamic routing takes no activation",
    ),
    "activation of another image": (
        lambda: SlimConvCaps2d(I, J, K, D, routing=Weighted)(torch.zeros(B, I, K, 4, 4), torch.zeros(B, I, 4, 5)),
        ValueError,
        r"activation must be \[B, in_types, H, W\] of poses \[2, 3, 3, 4, 4\], got \[2, 3, 4, 5\]",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_wrong_arguments(case: str) -> None:
    call, error, message = CALLS[case]
    with pytest.raises(error, match=message):
        call()
