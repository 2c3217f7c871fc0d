"""Length, Mask and the decoders against their definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capsfast.nn import ConvDecoder, Decoder, Length, Mask

from .support.plain import assert_alike, decoded, normalized

B, J, D = 5, 4, 6
LABELS = torch.tensor([3, 0, 0, 2, 1])


def capsules() -> Tensor:
    return torch.randn(B, J, D, dtype=torch.float64)


def test_length_is_the_root_of_the_sum_of_squares() -> None:
    v = capsules()
    wanted = torch.tensor([[sum(x * x for x in capsule) ** 0.5 for capsule in row] for row in v.tolist()])
    torch.testing.assert_close(Length()(v), wanted.double())
    assert Length()(v[0, 0]).shape == ()
    assert torch.autograd.gradcheck(Length(), (v.requires_grad_(),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_length_of_a_zero_capsule_has_gradient_zero(dtype: torch.dtype, compiled: bool) -> None:
    length = torch.compile(Length(), fullgraph=True, backend="aot_eager") if compiled else Length()
    v = torch.zeros(2, 3, dtype=dtype)
    v[1] = torch.tensor([3.0, 0.0, 4.0])
    v.requires_grad_()
    found = length(v)
    assert found.tolist() == [0, 5]
    found.sum().backward()
    torch.testing.assert_close(v.grad, torch.tensor([[0, 0, 0], [0.6, 0, 0.8]], dtype=dtype))


def test_mask_keeps_the_capsule_of_the_label() -> None:
    v = capsules().requires_grad_()
    kept = Mask()(v, LABELS)
    wanted = torch.zeros(B, J, D, dtype=torch.float64)
    for b, label in enumerate(LABELS.tolist()):
        wanted[b, label] = v[b, label].detach()
    assert torch.equal(kept, wanted)
    kept.sum().backward()
    assert v.grad is not None
    assert torch.equal(v.grad, (wanted != 0).double())


def test_mask_without_labels_keeps_the_longest() -> None:
    v = capsules()
    lengths = [[sum(x * x for x in capsule) for capsule in row] for row in v.tolist()]
    longest = torch.tensor([row.index(max(row)) for row in lengths])
    assert torch.equal(Mask()(v), Mask()(v, longest))


def test_what_other_capsules_hold_does_not_matter() -> None:
    v = capsules()
    v[0, 1] = float("nan")
    v.requires_grad_()
    kept = Mask()(v, LABELS)
    assert kept.isfinite().all()
    kept.square().sum().backward()
    assert v.grad is not None
    assert v.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"class_independent": True}, {"masked": False}], ids=str)
def test_decoder_is_a_perceptron_of_the_chosen_capsule(options: dict[str, Any]) -> None:
    decoder = Decoder(J, D, (2, 3, 4), hidden=(7, 5), dtype=torch.float64, **options)
    v = capsules().requires_grad_()
    found = decoder(v) if "masked" in options else decoder(v, LABELS)
    kept = v[torch.arange(B), LABELS] if "class_independent" in options else v
    wanted = decoded(decoder, kept, LABELS if not options else None)
    assert found.shape == (B, 2, 3, 4)
    assert_alike(found, wanted, [v, *decoder.parameters()])


def test_decoder_of_the_paper() -> None:
    decoder = Decoder(10, 16)
    shapes = [tuple(parameter.shape) for parameter in decoder.parameters()]
    assert shapes == [(512, 160), (512,), (1024, 512), (1024,), (784, 1024), (784,)]
    kinds = [type(layer).__name__ for layer in decoder.layers]
    assert kinds == ["Linear", "ReLU", "Linear", "ReLU", "Linear", "Sigmoid"]


def spread(x: Tensor, conv: nn.Module, stride: int, size: tuple[int, ...]) -> Tensor:
    """The place (y, x) writes its kernel from (stride·y, stride·x) on, at stride 1 around itself, cut at the border."""
    H, W = x.shape[2:]
    whole = x.new_zeros(len(x), conv.weight.shape[1], stride * H + 3, stride * W + 3)
    for row in range(H):
        for column in range(W):
            made = torch.einsum("bc,cdyx->bdyx", x[:, :, row, column], conv.weight)
            whole[:, :, stride * row : stride * row + 3, stride * column : stride * column + 3] += made
    first = 1 if stride == 1 else 0
    return whole[:, :, first : first + size[0], first : first + size[1]] + conv.bias[:, None, None]


@pytest.mark.parametrize(
    ("size", "channels", "steps"),
    [
        ((8, 8), None, [(8, 8)]),
        ((28, 28), None, [(7, 7), (14, 14), (28, 28)]),
        ((5, 11), (4, 2, 3), [(2, 3), (3, 6), (5, 11)]),
        ((1, 2), (4,), [(1, 2)]),
    ],
    ids=str,
)
def test_conv_decoder_doubles_feature_maps(size: Any, channels: Any, steps: list[tuple[int, int]]) -> None:
    torch.manual_seed(0)
    decoder = ConvDecoder(J, D, (3, *size), channels, class_independent=True, dtype=torch.float64)
    v = capsules().requires_grad_()
    images = decoder(v, LABELS)
    assert images.shape == (B, 3, *size) and images.min() == 0

    x = decoder.start(v[torch.arange(B), LABELS]).relu().view(B, 16, *steps[0])
    x = normalized(x, (0, 2, 3), 1e-3) * decoder.norm.weight[:, None, None] + decoder.norm.bias[:, None, None]
    for n, (conv, wanted) in enumerate(zip(decoder.convs, [*steps, size], strict=True)):
        x = spread(x, conv, 1 if n in (0, len(steps)) else 2, wanted)
    assert_alike(images, x.relu(), [v, *decoder.parameters()])


def test_conv_decoder_of_a_larger_image() -> None:
    decoder = ConvDecoder(10, 32, (3, 64, 64), class_independent=True, device="meta")
    assert decoder.start.out_features == 8 * 8 * 16
    assert [conv.out_channels for conv in decoder.convs] == [64, 32, 16, 8, 3]


@pytest.mark.parametrize("kind", [Decoder, ConvDecoder])
@pytest.mark.parametrize("options", [{}, {"class_independent": True}], ids=str)
def test_labels_and_longest_agree_and_gradients_reach_everything(kind: Any, options: dict[str, Any]) -> None:
    decoder = kind(J, D, (1, 6, 6), **options)
    v = capsules().float().requires_grad_()
    longest = v.norm(dim=2).argmax(1)
    assert torch.equal(decoder(v), decoder(v, longest))
    (decoder(v, LABELS) - 0.3).square().sum().backward()
    assert v.grad is not None
    assert torch.equal(v.grad.any(2), F.one_hot(LABELS, J).bool())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in decoder.parameters())
