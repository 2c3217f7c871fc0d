"""Every routing and every network as an ONNX file, run by onnxruntime for batches of several sizes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import capsfast
from capsfast.export import to_onnx
from capsfast.export.decompose import digamma

from ..support.layers import MODULES, NETWORKS, made
from ..support.routings import ROUTINGS

ONNX = [
    *(f"routed {name}" for name in ROUTINGS),
    *NETWORKS,
    "interests",
    "children",
    "children in videos",
    "windows of text",
    "scored matrices",
    "vectors",
]


class Results(nn.Module):
    def forward(self, images: Tensor) -> dict[str, Any]:
        return {"first": images + 1, "rest": (images + 2, {"images_out": images + 3}), "images": images + 4, "no": None}


class Taken(nn.Module):
    """Results with the names of a parameter, of an intermediate value, and of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, images: Tensor) -> dict[str, Any]:
        p = (images * self.scale).softmax(3)
        return {"softmax": p * 2, "scale": p.sum(3), "a": {"b": p + 1}, "a_b": p + 2}


@pytest.mark.parametrize("name", ONNX)
def test_onnx_computes_what_the_module_does(name: str, tmp_path: Path) -> None:
    import onnxruntime

    assert set(ONNX) <= MODULES.keys()
    module, example = made(name)
    file = to_onnx(module.eval(), example, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(str(file))
    inputs = [value.name for value in session.get_inputs()]
    for batch in (1, 3, 5):
        _, given = made(name, batch)
        with torch.no_grad():
            wanted = tree_leaves(module(*given))
        got = session.run(None, {name: value.numpy() for name, value in zip(inputs, given, strict=True)})
        for value, want in zip(got, [wanted_one for wanted_one in wanted if wanted_one is not None], strict=True):
            torch.testing.assert_close(torch.from_numpy(value), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            capsfast.models.CapsNet(1, 20, 3, conv_channels=4, primary_groups=1),
            ["lengths", "capsules", "reconstruction"],
        ),
        (
            capsfast.models.CapsNet(1, 20, 3, conv_channels=4, primary_groups=1, reconstruction=False),
            ["lengths", "capsules"],
        ),
        (Results(), ["first", "rest_0", "rest_1_images_out", "images_out"]),
        (nn.Flatten(), ["output"]),
        (Taken(), ["softmax_out", "scale_out", "a_b", "a_b_out"]),
    ],
)
def test_outputs_have_the_names_of_the_result(model: nn.Module, names: list[str], tmp_path: Path) -> None:
    file = to_onnx(model.eval(), torch.rand(2, 1, 20, 20), tmp_path / "model.onnx")
    import onnxruntime

    assert [output.name for output in onnxruntime.InferenceSession(str(file)).get_outputs()] == names


def test_digamma() -> None:
    positive = torch.logspace(-6, 6, 100_001, dtype=torch.float64)
    negative = -50 * torch.rand(100_000, dtype=torch.float64)
    # Near a pole torch's own result has 11 digits, so it can't be the truth of a float64 argument.
    for x in (positive, positive.float(), negative.float()):
        got, wanted = digamma(x), torch.digamma(x.double())
        assert got.dtype == x.dtype
        error = (got.double() - wanted).abs() / wanted.abs().clamp_min(1)
        assert error.max() <= 12 * torch.finfo(x.dtype).eps
    poles = torch.tensor([0, -1, -2, math.inf, math.nan])
    torch.testing.assert_close(digamma(poles), torch.digamma(poles), equal_nan=True)
    low = torch.tensor([0.1, 3.0], dtype=torch.bfloat16)
    assert torch.equal(digamma(low), torch.digamma(low))
