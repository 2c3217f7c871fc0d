"""Memory of convolutional capsules that are routed by passes: unfolded poses, and parts of the batch."""

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


GROWTH = """
import sys
import torch
from capsfast.bench.memory import _reset_peak, _resident
from capsfast.nn import ConvCaps2d

torch.set_num_threads(1)
competition, size = sys.argv[1], int(sys.argv[2])
more = {"pose_rows": 4, "num_iterations": 3, "competition": competition}
layer = ConvCaps2d(32, 2, 16, 16, kernel_size=3, routing="em", **more)

def call(size):
    image = torch.ones(1, 32, 16, size, size, requires_grad=True)
    poses, activations = layer(image)
    torch.autograd.backward((poses, activations), (torch.ones_like(poses), torch.ones_like(activations)))

call(4)
_reset_peak()
before = _resident()["VmRSS"]
call(size)
print(_resident()["VmHWM"] - before)
"""


def printed(program: str, *arguments: object) -> list[str]:
    """The words that a separate program prints, which measures its own memory."""
    root = Path(capsfast.__file__).parents[1]
    # Filling fresh memory with NaN would make unused pages resident. Freed memory goes back at once, so memory that the
    # C library keeps does not count.
    environment = {**os.environ, "CAPSFAST_POISON": "0", "MALLOC_MMAP_THRESHOLD_": "262144"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


measured = pytest.mark.skipif(bool(memory.why_not()), reason=memory.why_not())


@measured
def test_memory_grows_by_the_unfolded_poses_and_their_gradient() -> None:
    """Votes are twice as large as the unfolded poses. The poses, and the gradient of a pass, are in memory once."""
    (grown,) = printed(GROWTH, "child", 34)
    assert 1.9 < int(grown) / (32**2 * 9 * 32 * 16 * 4) < 2.95


@measured
def test_memory_of_independent_windows_is_bounded() -> None:
    """Block by block: three times the poses, and their gradient. The unfolded poses are 8.7 times as large."""
    # Blocks do not grow with the image, so in a smaller image they are a large part of the memory.
    (grown,) = printed(GROWTH, "window", 200)
    assert int(grown) < 4.1 * 200**2 * 32 * 16 * 4


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
    "two threads": {"threads": 2},
    "two threads, 16 bits": {"threads": 2, "dtype": torch.bfloat16},
    "two threads, shared weight": {"threads": 2, "shared": True},
    "two threads, fewer input capsules": {"threads": 2, "I": 1},
    "two threads, masked outputs": {"threads": 2, "out_mask": True, "normalize": "in"},
}


@pytest.fixture
def case(name: str) -> Iterator[dict[str, Any]]:
    """Sets the number of threads of the case, and scales its samples with it."""
    found = PARTS[name]
    before, threads = torch.get_num_threads(), found.get("threads", 1)
    torch.set_num_threads(threads)
    yield {"B": threads * B, "I": I, "J": J, "R": R, **found}
    torch.set_num_threads(before)


def given(case: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    dtype, samples, inputs, outputs, D = case.get("dtype", torch.float32), case["B"], case["I"], case["J"], case["R"]

    def tensor(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64).to(dtype)

    found = {"u": tensor(samples, inputs, K) - 0.5}
    found["weight"] = tensor(1 if "shared" in case else inputs, outputs, D, K) - 0.5
    found |= {name: tensor(samples, outputs, D) for name in ("center", "precision")}
    found |= {"prior": tensor(samples, outputs), "activation": tensor(samples, inputs)}
    return found | ({"logits": tensor(*case["logits"])} if "logits" in case else {})


def passed(values: dict[str, Tensor], case: dict[str, Any], part: slice) -> dict[str, Tensor]:
    """Moments and gradients of some samples."""
    samples = case["B"]
    leaves = {name: (value[part] if value.shape[0] == samples else value).detach() for name, value in values.items()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != "weight" or "frozen" not in case)

    def mask(size: int) -> Tensor:
        return (torch.arange(samples * size).view(samples, size) % 7 > 0)[part]

    options = {"normalize": case.get("normalize", "out"), "mask": mask(case["I"]), "second": True, "backend": "cpp"}
    if "out_mask" in case:
        options["out_mask"] = mask(case["J"])
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
def test_a_pass_over_parts_of_the_batch_is_that_over_all(case: dict[str, Any]) -> None:
    values, samples = given(case), case["B"]
    third = samples // 3
    assert native.extension is not None
    sizes = (case["I"], case["J"], case["R"], K)
    more = {"itemsize": values["u"].itemsize, "shared_weight": "shared" in case}
    plans = [native.extension.launch_plan(count, *sizes, **more)["pass_parts"] for count in (samples, third)]
    assert plans[0] > plans[1]
    whole = passed(values, case, slice(None))
    parts = [passed(values, case, part) for part in (slice(n, n + third) for n in range(0, samples, third))]
    for key, found in whole.items():
        each = [part[key] for part in parts]
        of_samples = found.shape[0] == samples
        wanted = torch.cat(each) if of_samples else torch.stack(each).sum(0)
        error = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[values["u"].dtype]
        assert (found - wanted).norm() <= error * max(1.0, float(wanted.norm())), key


SUMS = """
import torch
import capsfast
from capsfast.bench.memory import _reset_peak, _resident

torch.set_num_threads(1)
B, I, J, D, K = 420, 2048, 16, 16, 16
parts = [capsfast.native.extension.launch_plan(n, I, J, D, K, itemsize=2)["pass_parts"] for n in (B, B // 2)]
u, weight = (torch.ones(size, dtype=torch.bfloat16, requires_grad=True) for size in ((B, I, K), (I, J, D, K)))
found = capsfast.routing_pass(u, weight, query=torch.ones(B, J, D)).first.sum()
_reset_peak()
before = _resident()["VmRSS"]
found.backward()
print(parts[0] > parts[1], (_resident()["VmHWM"] - before - 2 * (u.numel() + weight.numel())) / 2**20)
"""


@measured
def test_parts_take_no_more_memory_than_they_save() -> None:
    """For a 16-bit weight, parts would need two sums of its size in float32: 64 MiB each."""
    several, grown = printed(SUMS)
    assert several == "True" and float(grown) < 60


WINDOWS: dict[str, dict[str, Any]] = {
    "3x3": {},
    "matrices": {"pose_rows": 2},
    "child": {"competition": "child"},
    "all": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (2, 1), "dilation": (2, 3)},
    "attention": {"routing": "inverted-attention"},
    "dynamic": {"routing": "dynamic", "competition": "child"},
    "1x1": {"kernel_size": 1},
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


@pytest.mark.parametrize("options", [{}, {"kernel_size": 1}, {"padding": 1, "stride": 2}], ids=str)
def test_folding_takes_gradients_in_batches(options: dict[str, Any]) -> None:
    layer = ConvCaps2d(1, 2, 3, 4, **{"kernel_size": 2, **options}, routing="em", dtype=torch.float64)
    poses = torch.randn(1, 1, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    found = layer(poses).poses
    upstream = torch.randn(2, *found.shape, dtype=torch.float64)
    (batched,) = torch.autograd.grad(found, poses, upstream, is_grads_batched=True, retain_graph=True)
    for each, wanted in zip(upstream, batched, strict=True):
        torch.testing.assert_close(torch.autograd.grad(found, poses, each, retain_graph=True)[0], wanted)


def test_unfolded_votes_lead_to_the_image_before_the_first_pass() -> None:
    layer = ConvCaps2d(1, 2, 3, 4, 2, routing="em")
    poses = torch.randn(1, 1, 3, 4, 5, requires_grad=True)
    votes = layer.votes(poses)
    assert isinstance(votes, UnfoldedVotes) and votes.u is not None
    for u in (votes.u, votes.tensors[0]):
        assert torch.autograd.grad(u.sum(), poses, retain_graph=True)[0].all()


def test_folding_has_a_second_derivative() -> None:
    layer = ConvCaps2d(1, 2, 2, 2, 2, routing="em", num_iterations=2, backend="reference", dtype=torch.float64)
    poses = torch.randn(1, 1, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).poses, poses)
