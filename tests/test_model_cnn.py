"""The convolutional baseline."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from capsfast.models import CNN, CapsNetOutput


def test_cnn_has_the_papers_parameters() -> None:
    """35.4 million (Sabour et al. 2017, section 5)."""
    model = CNN(device="meta")
    convs = (25 * 256 + 256) + (25 * 256 * 256 + 256) + (25 * 256 * 128 + 128)
    full = (28 * 28 * 128 * 328 + 328) + (328 * 192 + 192) + (192 * 10 + 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == convs + full == 35_445_522


def test_cnn_is_convolutions_and_a_softmax() -> None:
    model = CNN(2, (7, 6), 5, channels=(3, 4), kernel_size=3, hidden=(8, 6), dropout=0.5, dtype=torch.float64).eval()
    x = torch.rand(3, 2, 7, 6, dtype=torch.float64)
    p = dict(model.named_parameters())
    y = x
    for n in (0, 2):
        y = F.relu(F.conv2d(y, p[f"convs.{n}.weight"], p[f"convs.{n}.bias"], padding=1))
    y = y.flatten(1)
    for n in (0, 2):
        y = F.relu(y @ p[f"hidden.{n}.weight"].T + p[f"hidden.{n}.bias"])
    want = (y @ p["classes.weight"].T + p["classes.bias"]).softmax(1)
    output = model(x, torch.tensor([0, 1, 2]))
    assert isinstance(output, CapsNetOutput) and output.reconstruction is None
    torch.testing.assert_close(output.lengths, want)
    # A capsule has one number, the logarithm.
    torch.testing.assert_close(output.capsules, want.log()[:, :, None])
    assert torch.equal(model.classify(x).activations, output.lengths)
    assert not torch.equal(model.train()(x).lengths, output.lengths)


@pytest.mark.parametrize(
    ("wrong", "error", "rule"),
    [
        ({"kernel_size": 4}, ValueError, "kernel_size must be odd"),
        ({"channels": 3}, TypeError, "channels must be a sequence of ints, got 3"),
        ({"hidden": ()}, ValueError, r"hidden must hold at least 1 of them, got \(\)"),
        ({"hidden": (3, 0)}, ValueError, "hidden must be at least 1, got 0"),
        ({"dropout": 1.0}, ValueError, "dropout must be below 1, got 1.0"),
    ],
)
def test_cnn_rejects(wrong: dict[str, Any], error: type[Exception], rule: str) -> None:
    with pytest.raises(error, match=f"capsfast.models.CNN: {rule}"):
        CNN(**wrong)
