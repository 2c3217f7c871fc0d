"""What all networks share: image sizes, dtypes, compilation, training, every routing, decoders, wrong images."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast.nn import CapsNetLoss, MarginLoss, ReconstructionLoss

from .support.layers import CLASSES, NETWORKS, network, results
from .support.routings import ROUTINGS

B = 4
LABELS = torch.tensor([0, 4, 2, 1])
each_network = pytest.mark.parametrize("name", NETWORKS)
# Those with a decoder that reconstruction=False leaves out.
DECODED = ("CapsNet", "DeepCaps", "EfficientCapsNet", "InvertedAttentionCapsNet", "SegCaps")


def images(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(B, 2, 12, 10, dtype=dtype)


def loss_of(output: Any) -> Tensor:
    return sum((tensor * torch.linspace(-1, 1, tensor.numel()).view_as(tensor)).sum() for tensor in results(output))  # type: ignore[return-value]


# EfficientCapsNet takes 3 pixels at least.
ANY_SIZE: list[tuple[str, Any]] = [
    *product(["DeepCaps", "CapsNet", "InvertedAttentionCapsNet", "MatrixCapsNet"], [28, (9, 16), (3, 1), 1]),
    *(("EfficientCapsNet", size) for size in (28, (9, 16), 3)),
]


@pytest.mark.rows(10)
@pytest.mark.parametrize(("name", "size"), ANY_SIZE, ids=str)
def test_any_image_size(name: str, size: Any) -> None:
    model = network(name, size, 3)
    x = torch.rand(2, *model.image_shape)
    lengths, capsules, reconstruction = model(x, torch.tensor([3, 0]))
    assert lengths.shape == (2, CLASSES) and capsules.shape[:2] == (2, CLASSES)
    assert (reconstruction is None) if name == "MatrixCapsNet" else reconstruction.shape == x.shape


@pytest.mark.rows(9)
@each_network
def test_dtypes(name: str) -> None:
    model, x = network(name), images()
    wanted = results(model(x))
    with torch.autocast("cpu", torch.bfloat16):
        cast = results(model(x))
        loss_of(cast).backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in cast)
    if name not in ("MatrixCapsNet", "StackedCapsuleAutoencoder"):  # whose last steps are in float32
        torch.testing.assert_close(cast[0].float(), wanted[0], rtol=0.1, atol=0.05)
        assert {tensor.dtype for tensor in results(model.bfloat16()(x.bfloat16()))} == {torch.bfloat16}
    exact = results(network(name, dtype=torch.float64)(x.double()))
    assert {tensor.dtype for tensor in exact} == {torch.float64}
    assert all(parameter.is_meta for parameter in network(name, device="meta").parameters())


@pytest.mark.rows(1)
@each_network
def test_graph_of_one_piece(name: str) -> None:
    model, x = network(name), images()
    torch._dynamo.reset()
    found = []
    # In the backward of this one aot_eager keeps a view of a tensor with other strides.
    backend = "inductor" if name == "InvertedAttentionCapsNet" else "aot_eager"
    for each in (model, torch.compile(model, fullgraph=True, backend=backend)):
        model.zero_grad()
        output = each(x)
        loss_of(output).backward()
        found.append([*results(output), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


@pytest.mark.rows(9)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in ("SegCaps", "StackedCapsuleAutoencoder")])
def test_a_few_steps_of_training(name: str) -> None:
    model, x = network(name).train(), images()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03 if name == "MatrixCapsNet" else 0.01)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        if name == "CapsAutoEncoder":
            loss = ReconstructionLoss()(model(x).reconstruction, x)
        else:
            loss = CapsNetLoss(0.005)(model(x, LABELS), x, LABELS).total
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < (0.9 if name == "CapsAutoEncoder" else 0.5) * losses[0], losses
    if name != "CapsAutoEncoder":
        assert torch.equal(model(x).lengths.argmax(1), LABELS) and MarginLoss()(model(x).lengths, LABELS) < 0.5


ROUTED = [
    *product(["CapsNet", "DeepCaps", "CapsAutoEncoder", "SegCaps", "EfficientCapsNet"], ROUTINGS, [{}]),
    *product(["MatrixCapsNet"], ROUTINGS, [{"competition": "window"}, {"competition": "child"}]),
]


@pytest.mark.rows(30)
@pytest.mark.parametrize(("name", "routing", "options"), ROUTED, ids=str)
def test_every_routing(name: str, routing: str, options: dict[str, Any]) -> None:
    if name == "SegCaps" and not ROUTINGS[routing].of_votes:
        with pytest.raises(ValueError, match="SlimConvCaps2d: routing must need only votes"):
            network(name, routing=routing)
        return
    model, x = network(name, routing=routing, **options), images()
    output = model(x)
    assert output.lengths.shape[:2] == output.capsules.shape[:2] == (B, CLASSES)
    capsules, activations = model.classify(x)
    assert torch.equal(capsules, output.capsules) and torch.equal(activations, output.lengths)
    if name in ("CapsNet", "DeepCaps", "EfficientCapsNet"):
        assert torch.equal(output.reconstruction, model.reconstruct(capsules, activations.argmax(1)))
        diagnosis = capsfast.diagnose(model.routing, model.encode(x), LABELS)
        assert not any(finding.name == "not finite" for finding in diagnosis.findings)
    loss_of(output).backward()
    missing = [
        part
        for part, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all()
    ]
    if name == "MatrixCapsNet" and routing != "em":  # a routing that uses only poses gives activations no gradient
        missing = [text for text in missing if text.endswith(".W") or text.startswith("conv.")]
    assert not missing


@pytest.mark.rows(9)
@each_network
def test_wrong_images(name: str) -> None:
    model = network(name)
    with pytest.raises(ValueError, match=rf"models\.{name}: images must be \[B, 2, 12, 10\], got \[4, 2, 10, 12\]"):
        model(torch.rand(B, 2, 10, 12))
    with pytest.raises(ValueError, match=rf"models\.{name}: images must have shape \[B, C, H, W\], got \[2, 12, 10\]"):
        model(torch.rand(2, 12, 10))
    with pytest.raises(TypeError, match=r"images must be float32, .* got uint8; convert it with images\.float"):
        model(torch.zeros(B, 2, 12, 10, dtype=torch.uint8))


@pytest.mark.parametrize("name", DECODED)
def test_without_a_decoder(name: str) -> None:
    whole, bare = network(name), network(name, reconstruction=False)
    assert whole(images()).reconstruction.shape == (B, 2, 12, 10)
    output = bare(images())
    assert bare.decoder is None and output.reconstruction is None
    assert {*whole.state_dict()} - {*bare.state_dict()} == {f"decoder.{each}" for each in whole.decoder.state_dict()}
    with pytest.raises(RuntimeError, match="there is no decoder; build the model with reconstruction=True"):
        bare.reconstruct(output.capsules, LABELS)
    if name != "SegCaps":
        with pytest.raises(ValueError, match=r"labels must be in \[0, 4\], got 5"):
            whole(images(), LABELS + 1)
