"""Memory of convolutional capsules that are routed by passes: what is unfolded, and parts of the batch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import capsfast
from capsfast import native
from capsfast.bench import memory
from capsfast.nn import ConvCaps2d
from capsfast.nn.routing.unfolded import UnfoldedVotes

pytestmark = pytest.mark.skipif(native.extension is None, reason=f"the extension is absent: {native.why_absent}")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GROWTH = """
import torch
from capsfast.bench.memory import _reset_peak, _resident
from capsfast.nn import ConvCaps2d

torch.set_num_threads(1)
layer = ConvCaps2d(32, 2, 16, 16, kernel_size=3, routing="em", pose_rows=4, num_iterations=3)

def call(size):
    image = torch.ones(1, 32, 16, size, size, requires_grad=True)
    poses, activations = layer(image)
    torch.autograd.backward((poses, activations), (torch.ones_like(poses), torch.ones_like(activations)))

call(4)
size = 34
_reset_peak()
before = _resident()["VmRSS"]
call(size)
unfolded = (size - 2) ** 2 * 9 * 32 * 16 * 4
print((_resident()["VmHWM"] - before) / unfolded)
"""


@pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())
def test_memory_grows_by_the_unfolded_poses_and_their_gradient() -> None:
    """Votes are twice as large as the unfolded poses. These are there once, and so is the gradient of a pass."""
    root = Path(capsfast.__file__).parents[1]
    # Filling fresh memory would make pages resident that are never used.
    environment = {**os.environ, "CAPSFAST_POISON": "0"}
    ran = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, cwd=root, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert 1.9 < float(ran.stdout) < 2.8


B, I, J, K, R = 150, 18, 64, 4, 16
PARTS: dict[str, dict[str, Any]] = {
    "in place": {},
    "float64": {"dtype": torch.float64},
    "16 bits": {"dtype": torch.bfloat16},
    "odd rows": {"R": 15, "J": 63},
    "shared weight": {"shared": True},
    "over the inputs": {"normalize": "in"},
    "logits of a sample": {"logits": (B, I, J)},
    "shared logits": {"logits": (I, J)},
    "no weight gradient": {"frozen": True},
}


def given(case: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype, J_, D = case.get("dtype", torch.float32), case.get("J", J), case.get("R", R)

    def tensor(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64).to(dtype)

    found = {"u": tensor(B, I, K) - 0.5, "weight": tensor(1 if "shared" in case else I, J_, D, K) - 0.5}
    found |= {"center": tensor(B, J_, D), "precision": tensor(B, J_, D), "prior": tensor(B, J_)}
    found |= {"activation": tensor(B, I)} | ({"logits": tensor(*case["logits"])} if "logits" in case else {})
    return found


def passed(values: dict[str, Tensor], case: dict[str, Any], part: slice) -> dict[str, Tensor]:
    """Moments and gradients of some samples."""
    leaves = {
        name: (value[part] if value.shape[0] == B else value).detach().requires_grad_(name != "weight" or not frozen)
        for frozen in (case.get("frozen", False),)
        for name, value in values.items()
    }
    mask = (torch.arange(B * I).view(B, I) % 7 > 0)[part]
    options = {"normalize": case.get("normalize", "out"), "mask": mask, "second": True, "backend": "cpp"}
    moments = capsfast.routing_pass(**leaves, **options)
    assert moments.second is not None
    outputs = (moments.mass, moments.first, moments.second)
    loss = sum((x * torch.linspace(0.5, 1, x[0].numel(), dtype=x.dtype).view_as(x[0])).sum() for x in outputs)
    needing = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    gradients = torch.autograd.grad(loss, list(needing.values()))
    return {name: x.detach() for name, x in zip(("mass", "first", "second"), outputs, strict=True)} | {
        f"d{name}": gradient for name, gradient in zip(needing, gradients, strict=True)
    }


@pytest.mark.parametrize("name", PARTS)
def test_a_pass_over_parts_of_the_batch_is_that_over_all(name: str) -> None:
    case = PARTS[name]
    values, third = given(case), B // 3
    assert native.extension is not None
    sizes = (I, case.get("J", J), case.get("R", R), K)
    more = {"itemsize": values["u"].itemsize, "shared_weight": "shared" in case}
    plans = [native.extension.launch_plan(samples, *sizes, **more)["pass_parts"] for samples in (B, third)]
    assert plans[0] > plans[1]
    whole = passed(values, case, slice(None))
    parts = [passed(values, case, part) for part in (slice(n, n + third) for n in range(0, B, third))]
    for key, found in whole.items():
        each = [part[key] for part in parts]
        of_samples = found.shape[0] == B
        wanted = torch.cat(each) if of_samples else torch.stack(each).sum(0)
        error = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[values["u"].dtype]
        assert (found - wanted).norm() <= error * max(1.0, float(wanted.norm())), key


WINDOWS: dict[str, dict[str, Any]] = {
    "3x3": {},
    "matrices": {"pose_rows": 2},
    "child": {"competition": "child"},
    "all": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 3)},
    "attention": {"routing": "inverted-attention"},
    "dynamic": {"routing": "dynamic", "competition": "child"},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_folded_by_pass_is_the_gradient_of_unfolding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"kernel_size": 3, "routing": "em", **WINDOWS[name]}
    torch.manual_seed(0)
    layer = ConvCaps2d(2, 3, 4, 6, **options, dtype=torch.float64)
    poses = torch.randn(2, 2, 4, 7, 8, dtype=torch.float64, requires_grad=True)
    found = []
    for by_pass in (True, False):
        if not by_pass:
            monkeypatch.setattr("capsfast.nn.conv_caps.folds_by_pass", lambda poses: False)
        votes = layer.votes(poses)
        assert isinstance(getattr(votes, "votes", votes), UnfoldedVotes) == by_pass
        out = layer(poses)
        out = out if isinstance(out, Tensor) else out.poses
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found.append(torch.autograd.grad((out * weights).sum(), [poses, layer.routing.W]))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 1e-13 * other.norm()


def test_folding_has_a_second_derivative() -> None:
    layer = ConvCaps2d(1, 2, 2, 2, 2, routing="em", num_iterations=2, backend="reference", dtype=torch.float64)
    poses = torch.randn(1, 1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).poses, poses)
