"""capsfast.identify: what a layer computes is found by what it does."""

import copy
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import capsfast
from capsfast.adopt import Identification, NotReproduced

from .support.published import PUBLISHED, Published, float64

I, J, D, K = 7, 4, 5, 6


def squash(s: Tensor) -> Tensor:
    n = s.square().sum(-1, keepdim=True)
    return n / (1 + n) * s / torch.sqrt(n + 1e-8)


class Plain(nn.Module):
    """Paper routing with a bare torch.zeros; what else a layer does is in its subclasses."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.3 * torch.randn(*(sizes or (I, J, D, K))))

    def votes(self, u: Tensor) -> Tensor:
        return torch.einsum("ijdk,bik->bijd", self.W, u)

    def start(self, votes: Tensor) -> Tensor:
        return torch.zeros(votes.shape[:3])

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(u)
        b = self.start(votes)
        for _ in range(num_iterations):
            v = squash((b.softmax(2)[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v


def example(B: int = 5) -> Tensor:
    return torch.randn(B, I, K)


def rel(got: Tensor, right: Tensor) -> float:
    assert got.shape == right.shape
    return float(((got - right).norm() / right.norm()).detach())


def reproduced(found: Identification, layer: nn.Module, *inputs: Any) -> None:
    """Values and gradients in float64, on other numbers than those that were tried."""
    with float64():
        layer = copy.deepcopy(layer).double()
        u, *others = (each.double() if isinstance(each, Tensor) else each for each in inputs)
        u = torch.randn_like(u).requires_grad_()
        leaves = [u, *layer.parameters()]
        theirs = layer(u, *others)
        ours = found(found.tensors(layer), u, *others)
        assert rel(ours, theirs) <= 1e-10
        direction = torch.randn_like(theirs)
        wanted, got = (torch.autograd.grad((each * direction).sum(), leaves) for each in (theirs, ours))
    assert max(map(rel, got, wanted)) <= 1e-10


REPRODUCIBLE = [row for row in PUBLISHED if row.reproducible]


@pytest.mark.parametrize("row", REPRODUCIBLE, ids=lambda row: row.name)
def test_published_layers(row: Published) -> None:
    torch.manual_seed(0)
    layer, inputs = row.make(), row.example()
    found = capsfast.identify(layer, *inputs)
    for name in (
        "weight", "num_iterations", "softmax", "gradient", "leaky", "squash", "eps", "averaged",
        "squash_last", "logits", "bias",
    ):  # fmt: skip
        assert getattr(found, name) == getattr(row, name), name
    assert found.weight_order == (row.order or "") and found.output_order == row.out
    assert found.input_order == ("BIJD" if row.weight is None else "BKI" if row.transposed else "BIK")
    assert row.logits is None or found.logits_order == row.logits_order
    assert found.arguments == (("mask" if row.mask else "unused",) if len(inputs) > 1 else ())
    assert found.forward_difference <= 1e-10 and found.gradient_difference <= 1e-10
    notes = ["the first forward makes"] * row.lazy + ["argument 2 is a mask of 0 and 1 alone"] * ("after" in row.name)
    assert len(found.notes) == len(notes) and all(map(str.startswith, found.notes, notes))
    theirs = layer(*inputs)
    assert rel(found(found.tensors(layer), *inputs), theirs) <= 1e-4
    reproduced(found, layer, *inputs)


REASONS = {
    "element-wise squash": "its squash is element-wise",
    "squash over the output capsules": "its squash takes lengths over the output capsules",
    "cosine agreement": "an agreement of normalised vectors",
}


@pytest.mark.parametrize("row", [row for row in PUBLISHED if not row.reproducible], ids=lambda row: row.name)
def test_published_layers_that_are_none(row: Published) -> None:
    torch.manual_seed(0)
    with pytest.raises(NotReproduced, match=r"is not reproduced: .* The nearest call differs by \d") as caught:
        capsfast.identify(row.make(), *row.example())
    assert REASONS[row.name] in caught.value.reason
    assert caught.value.nearest is not None and caught.value.nearest.weight == "W"
    assert caught.value.difference is not None and 0.01 < caught.value.difference < 10


class Alike(Plain):
    """All sizes are 4, the batch too: shapes say nothing."""

    def __init__(self, product: str) -> None:
        super().__init__(4, 4, 4, 4)
        self.product = product

    def votes(self, u: Tensor) -> Tensor:
        return torch.einsum(self.product, self.W, u)


@pytest.mark.parametrize("order", ["IJDK", "IJKD", "JIKD", "KDIJ"])
def test_axes_of_one_length_are_told_apart(order: str) -> None:
    layer, u = Alike(f"{order.lower()},bik->bijd"), torch.randn(4, 4, 4)
    found = capsfast.identify(layer, u)
    assert (found.weight_order, found.input_order, found.output_order) == (order, "BIK", "BJD")
    reproduced(found, layer, u)


@pytest.mark.parametrize("sizes", [(I, 1, D, K), (I, J, 1, K), (1, J, D, K), (I, J, D, 1)], ids=str)
def test_axes_of_length_one(sizes: tuple[int, ...]) -> None:
    layer, u = Plain(*sizes), torch.randn(1, sizes[0], sizes[3])
    found = capsfast.identify(layer, u)
    assert found.sizes == sizes and not found.options
    reproduced(found, layer, u)


class Reshaping(Plain):
    """Takes capsules or votes, and gives its result, with other axes."""

    def __init__(self, given: Callable[[Tensor], Tensor], returned: Callable[[Tensor], Tensor], votes: bool) -> None:
        super().__init__()
        self.given, self.returned, self.of_votes = given, returned, votes
        if votes:
            del self.W

    def votes(self, u: Tensor) -> Tensor:
        return u if self.of_votes else super().votes(u)

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        return self.returned(super().forward(self.given(u), num_iterations))


# Order of the input, its shape, how the layer reads it; the same of the output.
RESHAPED: list[tuple[str, tuple[int, ...], Callable[[Tensor], Tensor], str, Callable[[Tensor], Tensor]]] = [
    ("BIK1", (4, I, K, 1), lambda u: u.squeeze(3), "BJD1", lambda v: v[..., None]),
    ("B1IK", (4, 1, I, K), lambda u: u.squeeze(1), "JBD", lambda v: v.transpose(0, 1)),
    ("BI1K1", (4, I, 1, K, 1), lambda u: u[:, :, 0, :, 0], "B1JD1", lambda v: v[:, None, ..., None]),
    ("B(IK)", (4, I * K), lambda u: u.unflatten(1, (I, K)), "B(JD)", lambda v: v.flatten(1)),
    ("B(KI)", (4, I * K), lambda u: u.unflatten(1, (K, I)).transpose(1, 2), "DJB", lambda v: v.permute(2, 1, 0)),
    ("BIJD1", (4, I, J, D, 1), lambda u: u.squeeze(4), "B1JD", lambda v: v[:, None]),
    ("B1JID", (4, 1, J, I, D), lambda u: u.squeeze(1).transpose(1, 2), "BDJ", lambda v: v.transpose(1, 2)),
    ("BI(JD)", (4, I, J * D), lambda u: u.unflatten(2, (J, D)), "BJD", lambda v: v),
]


@pytest.mark.parametrize("row", RESHAPED, ids=lambda row: f"{row[0]} to {row[3]}")
def test_inputs_and_outputs_in_other_shapes(row: tuple[Any, ...]) -> None:
    order, shape, given, out, returned = row
    layer, u = Reshaping(given, returned, votes="J" in order), torch.randn(shape)
    found = capsfast.identify(layer, u)
    assert (found.input_order, found.output_order, found.options) == (order, out, {})
    reproduced(found, layer, u)


def test_what_makes_no_difference_is_as_in_the_paper() -> None:
    """One iteration of two inputs and two outputs: either softmax gives 1/2; and no agreement has a gradient."""
    found = capsfast.identify(Plain(2, 2, D, K), torch.randn(3, 2, K), call=lambda layer, u: layer(u, 1))
    assert found.options == {"num_iterations": 1}


class WithMask(Plain):
    """A mask of the votes, as an argument, in a buffer, or of the coupling of a softmax over the inputs."""

    mask: Tensor

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.register_buffer("mask", torch.ones(I) if where == "buffer" else None)

    def forward(self, u: Tensor, mask: Any = None) -> Any:
        if self.where != "coupling":
            return super().forward(u * (self.mask if self.where == "buffer" else mask)[..., None])
        votes = self.votes(u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(3):
            v = squash((b.softmax(1)[..., None] * mask[..., None, None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_a_mask_of_nothing_but_ones_is_a_mask(dtype: torch.dtype) -> None:
    found = capsfast.identify(WithMask("argument"), example(), torch.ones(5, I, dtype=dtype))
    assert (found.arguments, found.argument_orders) == (("mask",), ("BI",))
    assert "argument 2 is the mask [B, I]" in found.describe()


def test_a_mask_that_no_option_is() -> None:
    with pytest.raises(NotReproduced, match="depends on argument 2 of the forward, which is neither a mask nor"):
        capsfast.identify(WithMask("coupling"), example(), torch.ones(5, I))
    with pytest.raises(NotReproduced, match=r"depends on `mask` \[7\], which is neither logits, nor a bias") as caught:
        capsfast.identify(WithMask("buffer"), example())
    assert caught.value.nearest is not None and caught.value.nearest.weight_order == "IJDK"


class DrawnLogits(Plain):
    def start(self, votes: Tensor) -> Tensor:
        return torch.randn(votes.shape[:3])


class Dropout(Plain):
    def votes(self, u: Tensor) -> Tensor:
        return super().votes(F.dropout(u, 0.5, self.training))


class Remembering(Plain):
    """Logits go on from call to call."""

    b: Tensor | None = None

    def start(self, votes: Tensor) -> Tensor:
        return torch.zeros(votes.shape[:3]) if self.b is None else self.b

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        v = super().forward(u, num_iterations)
        self.b = (self.votes(u) * v[:, None]).sum(-1).detach()
        return v


class NoGradient(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        with torch.no_grad():
            return super().forward(u, num_iterations)


class HalfDetached(Plain):
    """The agreement has a gradient through the output, but none through the votes."""

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(u)
        b = self.start(votes)
        for _ in range(num_iterations):
            v = squash((b.softmax(2)[..., None] * votes).sum(1))
            b = b + (votes.detach() * v[:, None]).sum(-1)
        return v


class LongInputs(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        return super().forward(u, 2 if u.norm() > 30 else num_iterations)


class OverBatch(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(u)
        return squash((torch.zeros(votes.shape[:3]).softmax(0)[..., None] * votes).sum(1))


class OffsetVotes(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(J, D))

    def votes(self, u: Tensor) -> Tensor:
        return super().votes(u) + self.offset


REFUSED: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "drawn logits": (DrawnLogits, example(), "it draws random numbers"),
    "dropout": (Dropout, example(), "it draws random numbers .* or dropout"),
    "dropout, evaluation mode": (lambda: Dropout().eval(), example(), "something else in training mode"),
    "a state": (Remembering, example(), "it keeps a state"),
    "no gradient": (NoGradient, example(), "its output has no gradient"),
    "half detached": (HalfDetached, example(), "its gradient goes neither through all iterations nor through the last"),
    "control flow": (LongInputs, 4 * example(), "on u it computes something else than on random numbers"),
    "over the batch": (OverBatch, example(), "its coupling is a softmax over the batch"),
    "offset": (OffsetVotes, example(), r"depends on `offset` \[4, 5\], which is neither logits, nor a bias"),
    "linear": (lambda: nn.Linear(K, J), example(), "does not point along the sum of the votes"),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8), "do not have the axes of one routing"),
    "no fit": (Plain, torch.randn(2, 3, 4), "a copy of it fails on u, with RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, u, reason = REFUSED[name]
    with pytest.raises(NotReproduced, match=rf"^capsfast\.identify: \w+ is not reproduced: .*{reason}"):
        capsfast.identify(make(), u)


class Frozen(Plain):
    """All iterations but the last under torch.no_grad."""

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(u)
        b = self.start(votes)
        with torch.no_grad():
            for _ in range(num_iterations - 1):
                b = b + (votes * squash((b.softmax(2)[..., None] * votes).sum(1))[:, None]).sum(-1)
        return squash((b.softmax(2)[..., None] * votes).sum(1))


def test_no_grad_inside_is_the_gradient_of_the_last_iteration() -> None:
    layer = Frozen()
    found = capsfast.identify(layer, example())
    assert found.options == {"gradient": "last"}
    reproduced(found, layer, example())


def test_number_of_iterations_as_an_argument() -> None:
    layer, u = Plain(), example()
    assert capsfast.identify(layer, u, call=lambda layer, u: layer(u, 2)).num_iterations == 2
    for n in (4, 5):  # 5 is the batch size too
        found = capsfast.identify(layer, u, n)
        assert (found.num_iterations, found.arguments) == (n, ("constant",))
        assert "argument 2 counts as a constant" in found.describe()


class Lengths(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        v = super().forward(u, num_iterations)
        return v.norm(dim=-1), v, {"v": v}


def test_part_of_the_output() -> None:
    layer, u = Lengths(), example()
    found = capsfast.identify(layer, u)
    assert found.part == 1 and "the output is entry 1 of a tuple" in found.describe()
    assert capsfast.identify(layer, u, output=lambda found: found[2]["v"]) == Identification(
        "W", "IJDK", "BIK", "BJD", found.sizes
    )
    with pytest.raises(NotReproduced, match="the output is a dict, not a tensor; output= says which part"):
        capsfast.identify(layer, u, output=lambda found: found[2])


class FixedBatch(Plain):
    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.zeros(5, I, J))

    def start(self, votes: Tensor) -> Tensor:
        return self.b + 0 * votes[..., 0]


def test_logits_that_fix_the_batch_size() -> None:
    layer = FixedBatch()
    found = capsfast.identify(layer, example())
    assert (found.logits, found.logits_order) == ("b", "BIJ")
    assert found.notes == ("`b` fixes the batch size at 5",)
    reproduced(found, layer, example())


class Squeezed(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        return super().forward(u, num_iterations).squeeze()


def test_a_single_sample_that_loses_its_axis_is_noted() -> None:
    found = capsfast.identify(Squeezed(), example(1))
    assert found.output_order == "BJD"
    assert found.notes == ("for a single sample the layer gives [4, 5], the call [1, 4, 5]",)


class Shared(nn.Module):
    """The votes are those of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.routing = Plain()
        del self.routing.W
        self.to_votes = nn.Linear(K, J * D, bias=False)
        self.routing.votes = lambda u: u  # type: ignore[method-assign]

    def forward(self, u: Tensor) -> Any:
        return self.routing(self.to_votes(u).unflatten(2, (J, D)))


def test_a_linear_layer_makes_a_shared_weight() -> None:
    layer = Shared()
    found = capsfast.identify(layer, example())
    assert (found.weight, found.weight_order) == ("to_votes.weight", "(JD)K")
    assert "shared by all input capsules" in found.describe()
    reproduced(found, layer, example())


class Float32(Plain):
    """Asks for float32 by name."""

    def start(self, votes: Tensor) -> Tensor:
        return torch.zeros(votes.shape[:3], dtype=torch.float32)

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        return super().forward(u.float(), num_iterations).to(torch.float32)


class Old(Plain):
    """Its logits have one dtype whatever is asked for, and its product takes no two."""

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(u)
        b = torch.FloatTensor(*votes.shape[:3]).zero_()
        for _ in range(num_iterations):
            v = squash(torch.einsum("bij,bijd->bjd", b.softmax(2), votes))
            b = b + (votes * v[:, None]).sum(-1)
        return v


def test_other_dtypes() -> None:
    paper = capsfast.identify(Plain(), example())
    assert not paper.options
    assert capsfast.identify(Plain().bfloat16(), example().bfloat16()) == paper
    assert capsfast.identify(Plain().double(), example()[:, :, :].double(), call=lambda layer, u: layer(u)) == paper
    found = capsfast.identify(Float32(), example())
    assert found == paper and found.forward_difference < 1e-14
    old = capsfast.identify(Old(), example())
    assert old == paper and 1e-9 < old.forward_difference < 1e-5
    assert "compared in float32" in old.notes[0]


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 + x


def test_wrapped_and_parametrized_layers() -> None:
    u = example()
    paper = capsfast.identify(Plain(), u)
    assert capsfast.identify(nn.DataParallel(Plain()), u) == paper
    compiled = torch.compile(Plain())
    assert capsfast.identify(compiled, u) == paper and set(paper.tensors(compiled)) == {"W"}
    frozen = Plain().requires_grad_(False)
    assert capsfast.identify(frozen, u) == paper and not frozen.W.requires_grad
    layer = Plain()
    nn.utils.parametrize.register_parametrization(layer, "W", AddOne())
    assert capsfast.identify(layer, u) == paper
    assert rel(paper(paper.tensors(layer), u), layer(u)) < 1e-5
    paper(paper.tensors(layer), u).sum().backward()
    assert layer.parametrizations["W"].original.grad is not None  # type: ignore[index, union-attr]


def test_distributed_data_parallel() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        layer = nn.parallel.DistributedDataParallel(Plain())
        found = capsfast.identify(layer, example())
        assert found.weight == "W" and found.tensors(layer)["W"] is layer.module.W
    finally:
        torch.distributed.destroy_process_group()


def test_layers_of_capsfast() -> None:
    layer = capsfast.DynamicRouting(I, J, K, D, learned_logits=True, bias=True, leaky=True, eps=1e-6)
    found = capsfast.identify(layer, example())
    assert (found.weight, found.logits, found.bias) == ("W", "routing.logits", "routing.bias")
    assert found.options == {"leaky": True, "eps": 1e-6}


class Recording(Plain):
    """Keeps what it saw, with its gradient, and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(J))

    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        self.last = super().forward(u, num_iterations)
        self.seen = self.last.detach().norm(dim=-1).mean(0)
        return self.last


@pytest.mark.parametrize("make", [Plain, DrawnLogits])
def test_random_numbers_of_torch_stay_as_they_are(make: Callable[[], nn.Module]) -> None:
    layer, u = make(), example()
    before = torch.get_rng_state()
    with nullcontext() if make is Plain else pytest.raises(NotReproduced):
        capsfast.identify(layer, u)
    assert torch.equal(torch.get_rng_state(), before)


class NoEps(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        votes = self.votes(u)
        b = self.start(votes)
        for _ in range(num_iterations):
            s = (b.softmax(2)[..., None] * votes).sum(1)
            n = s.square().sum(-1, keepdim=True)
            v = n / (1 + n) * s / n.sqrt()
            b = b + (votes * v[:, None]).sum(-1)
        return v


def test_an_input_of_zeros() -> None:
    """A layer without eps gives NaN for it, which can't be compared."""
    layer = NoEps()
    found = capsfast.identify(layer, torch.zeros(5, I, K))
    assert found.options == {"eps": 1e-20}
    assert found.notes == ("on u the layer gives numbers that are not finite, so only random ones were compared",)
    assert not capsfast.identify(Plain(), torch.zeros(5, I, K)).options


def test_numbers_that_saturate_the_squash() -> None:
    layer, u = Plain(200, 10, 16, 8), 5 * torch.randn(3, 200, 8)
    layer.W.data.normal_()
    assert (layer(u).norm(dim=-1) > 0.999).all()
    found = capsfast.identify(layer, u)
    assert not found.options and found.gradient_difference < 1e-8


class Picky(Plain):
    def forward(self, u: Tensor, num_iterations: int = 3) -> Any:
        if (u < 0).any():
            raise ValueError("no negative numbers")
        return super().forward(u, num_iterations)


def test_a_layer_that_does_not_take_random_numbers() -> None:
    with pytest.raises(NotReproduced, match="it fails on random numbers, with ValueError: no negative numbers"):
        capsfast.identify(Picky(), example().abs())


def test_the_layer_stays_as_it_is() -> None:
    layer, u = Recording().eval(), example()
    layer(u).sum().backward()
    called: list[nn.Module] = []
    layer.register_forward_hook(lambda module, *_: called.append(module))
    last, gradient, state = layer.last, layer.W.grad, {name: each.clone() for name, each in layer.state_dict().items()}
    numbers, before = torch.get_rng_state(), u.clone()
    assert gradient is not None
    values = gradient.clone()
    found = capsfast.identify(layer, u)
    assert found.notes == (
        "its forward changes seen, last, the call does not",
        "the layer has forward or backward hooks, which the call leaves out",
    )
    assert layer.last is last and last.grad_fn is not None
    assert layer.W.grad is gradient and torch.equal(gradient, values)
    assert all(torch.equal(each, state[name]) for name, each in layer.state_dict().items())
    assert not layer.training and not called and layer.W.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), numbers) and torch.equal(u, before)
    assert torch.get_default_dtype() == torch.float32


def test_it_disturbs_no_other_thread() -> None:
    """torch.zeros of another thread stays float32 all the while."""
    layer, u, stop, dtypes = Plain(), example(), threading.Event(), set()

    def work() -> None:
        while not stop.is_set():
            dtypes.add(torch.zeros(1).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        capsfast.identify(layer, u)
    finally:
        stop.set()
        thread.join()
    assert dtypes == {torch.float32}


def test_inside_no_grad_and_on_an_input_that_requires_a_gradient() -> None:
    u = example().requires_grad_()
    with torch.no_grad():
        assert not capsfast.identify(Plain(), 1 * u).options
    assert not capsfast.identify(Plain(), u).options and u.grad is None


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parent.parent / "docs" / "adoption.md").read_text(encoding="utf-8")
    code, shown = (
        text.partition("```python\n")[2].partition("```")[0],
        text.partition("```text\n")[2].partition("```")[0],
    )
    exec(code, {"__name__": "__main__"})
    printed = [re.sub(r"\d\.\de-\d\d", "…", each) for each in (capsys.readouterr().out, shown)]
    assert printed[0] == printed[1] and len(shown.splitlines()) == 7


def test_eps_shortens_short_capsules() -> None:
    """By what the page says."""
    s = torch.tensor([1e-3], dtype=torch.float64)
    assert f"{1 - float(capsfast.squash(s) / capsfast.squash(s, eps=1e-20)):.1%}" == "0.5%"


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"capsfast\.identify: layer must be a torch\.nn\.Module, got function"):
        capsfast.identify(squash, example())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"u must be a torch\.Tensor, got list"):
        capsfast.identify(Plain(), [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="u must be float32"):
        capsfast.identify(Plain(), torch.ones(2, I, K, dtype=torch.int64))
    for bad in (torch.randn(3), torch.randn(0, I, K)):
        with pytest.raises(ValueError, match=r"u must be input capsules \[B, I, K\] or votes \[B, I, J, D\], got"):
            capsfast.identify(Plain(), bad)
