"""capsfast.identify: finds what a layer computes by running it."""

import copy
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import capsfast
from capsfast.adopt import Identification, NotReproduced
from capsfast.adopt.trial import relative

from .support.adopted import D, I, J, K, Plain, example, masked_after, squash, variant
from .support.published import PUBLISHED, Published, float64


def reproduced(found: Identification, layer: nn.Module, *inputs: Any) -> None:
    """Compares values and gradients in float64, on numbers that identify() did not try."""

    def double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    with float64():
        layer = copy.deepcopy(layer).double()
        u, *others = map(double, inputs)
        u = torch.randn_like(u).requires_grad_()
        leaves = [u, *layer.parameters()]
        theirs, ours = layer(u, *others), found(found.tensors(layer), u, *others)
        direction = torch.randn_like(theirs)
        wanted, got = (torch.autograd.grad((each * direction).sum(), leaves) for each in (theirs, ours))
    assert max(map(relative, (ours, *got), (theirs, *wanted))) <= 1e-10


@pytest.mark.parametrize("row", [row for row in PUBLISHED if row.reproducible], ids=lambda row: row.name)
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
    role = "unused" if not row.mask else "mask_after" if "after" in row.name else "mask"
    assert found.arguments == ((role,) if len(inputs) > 1 else ())
    assert found.forward_difference <= 1e-10 and found.gradient_difference <= 1e-10
    notes = ["the first forward makes"] * row.lazy
    assert len(found.notes) == len(notes) and all(map(str.startswith, found.notes, notes))
    theirs = layer(*inputs)
    assert relative(found(found.tensors(layer), *inputs), theirs) <= 1e-4
    reproduced(found, layer, *inputs)


def test_the_table_covers_what_it_should() -> None:
    assert len(PUBLISHED) >= 25 and len({row.name for row in PUBLISHED}) == len(PUBLISHED)
    assert [row.name for row in PUBLISHED if not row.reproducible] == [*REASONS]


REASONS = {
    "element-wise squash": "or the squash is element-wise",
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


@pytest.mark.parametrize(
    ("order", "shape", "axes"),
    [("(IJD)K1", (I * J * D, K, 1), (I, J, D, K)), ("1IJDK1", (1, I, J, D, K, 1), (I, J, D, K))],
)
def test_weights_with_axes_merged_or_of_length_one(order: str, shape: Any, axes: Any) -> None:
    layer = variant(sizes=shape, votes=lambda self, u: torch.einsum("ijdk,bik->bijd", self.W.view(axes), u))
    found = capsfast.identify(layer, example())
    assert found.weight_order == order and found.sizes == (I, J, D, K)
    reproduced(found, layer, example())


@pytest.mark.parametrize("order", ["IJKD", "KDIJ"])
def test_axes_of_one_length_are_told_apart(order: str) -> None:
    """All sizes are 4, the batch too, so shapes tell nothing."""
    product = f"{order.lower()},bik->bijd"
    layer = variant(sizes=(4, 4, 4, 4), votes=lambda self, u: torch.einsum(product, self.W, u))
    found = capsfast.identify(layer, torch.randn(4, 4, 4))
    assert (found.weight_order, found.input_order, found.output_order) == (order, "BIK", "BJD")
    reproduced(found, layer, torch.randn(4, 4, 4))


@pytest.mark.parametrize("sizes", [(I, 1, D, K), (I, J, 1, K), (1, J, D, K), (I, J, D, 1)], ids=str)
def test_axes_of_length_one(sizes: tuple[int, ...]) -> None:
    layer, u = Plain(*sizes), torch.randn(1, sizes[0], sizes[3])
    found = capsfast.identify(layer, u)
    assert found.sizes == sizes and not found.options
    reproduced(found, layer, u)


# Order and shape of the input, and how the layer reads it; the same for the output.
RESHAPED: list[tuple[str, tuple[int, ...], Callable[[Tensor], Tensor], str, Callable[[Tensor], Tensor]]] = [
    ("B1IK", (4, 1, I, K), lambda u: u.squeeze(1), "JBD", lambda v: v.transpose(0, 1)),
    ("BI1K1", (4, I, 1, K, 1), lambda u: u[:, :, 0, :, 0], "B1JD1", lambda v: v[:, None, ..., None]),
    ("B(KI)", (4, I * K), lambda u: u.unflatten(1, (K, I)).transpose(1, 2), "DJB", lambda v: v.permute(2, 1, 0)),
    ("B1JID", (4, 1, J, I, D), lambda u: u.squeeze(1).transpose(1, 2), "BDJ", lambda v: v.transpose(1, 2)),
    ("BI(JD)", (4, I, J * D), lambda u: u.unflatten(2, (J, D)), "B(JD)", lambda v: v.flatten(1)),
]


@pytest.mark.parametrize("row", RESHAPED, ids=lambda row: f"{row[0]} to {row[3]}")
def test_inputs_and_outputs_in_other_shapes(row: tuple[Any, ...]) -> None:
    order, shape, given, out, returned = row
    layer = variant(
        votes=(lambda self, u: u) if "J" in order else Plain.votes,
        forward=lambda self, u: returned(Plain.forward(self, given(u))),
    )
    if "J" in order:
        del layer.W
    found = capsfast.identify(layer, torch.randn(shape))
    assert (found.input_order, found.output_order, found.options) == (order, out, {})
    reproduced(found, layer, torch.randn(shape))


MASK = torch.rand(5, I, generator=torch.Generator().manual_seed(0)) > 0.4


@pytest.mark.parametrize("mask", [MASK, torch.ones(5, I)], ids=["bool", "float"])
@pytest.mark.parametrize("of_votes", [False, True], ids=["weight", "votes"])
def test_a_mask_behind_a_softmax_over_the_inputs(mask: Tensor, of_votes: bool) -> None:
    """A float mask counts as a factor, even if the example only had 0 and 1."""
    layer, u = variant(forward=masked_after), example()
    if of_votes:
        layer, u = variant(forward=masked_after, votes=lambda self, u: u), torch.randn(5, I, J, D)
        del layer.W
    found = capsfast.identify(layer, u, mask)
    assert (found.arguments, found.argument_orders, found.softmax) == (("mask_after",), ("BI",), "in")
    assert not found.notes and found.options == {"softmax": "in"}
    assert "argument 2 [B, I] multiplies the coupling behind the softmax" in found.describe()
    reproduced(found, layer, u, torch.rand(5, I) if mask.is_floating_point() else ~mask)


def kept_by(keep: Callable[[Tensor], Tensor]) -> nn.Module:
    """A layer whose argument says by ``keep`` which input capsules count."""

    def forward(self: Plain, u: Tensor, absent: Tensor) -> Tensor:
        votes = self.votes(u)
        b = torch.zeros(votes.shape[:3])
        for _ in range(3):
            c = b.masked_fill(~keep(absent)[..., None], -torch.inf).softmax(1)
            v = squash((c[..., None] * votes).sum(1))
            b = b + (votes * v[:, None]).sum(-1)
        return v

    return variant(forward=forward)  # type: ignore[no-any-return]


# What says that input capsules are padding, and a layer's way to read it.
PADDED: dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]] = {
    "bool": (~MASK, lambda mask: ~mask),
    "no padding": (torch.zeros(5, I, dtype=torch.bool), lambda mask: ~mask),
    "float": ((~MASK).float(), lambda mask: mask < 0.5),
    "int": ((~MASK).long(), lambda mask: mask == 0),
    "lengths": (torch.arange(2, 7), lambda lengths: torch.arange(I) < lengths[:, None]),
    "column of lengths": (torch.arange(2, 7)[:, None], lambda lengths: torch.arange(I) < lengths),
    "full lengths": (torch.full((5,), I + 2), lambda lengths: torch.arange(I) < lengths[:, None]),
    "added": (torch.zeros(5, I).masked_fill(~MASK, -1e4), lambda mask: mask > -1e4),
}


@pytest.mark.rows(8)
@pytest.mark.parametrize("name", PADDED)
def test_padding_that_is_given_in_another_way_is_named_with_the_mask_to_pass(name: str) -> None:
    (value, keep), u = PADDED[name], example()
    message = r"reproduced: argument 2 of the forward \(`absent`\) .* and pass ([^;]+?)(\. The nearest.*)?$"
    with pytest.raises(NotReproduced) as refused:
        capsfast.identify(kept_by(keep), u, value)
    remedy = re.search(message, str(refused.value))
    assert remedy is not None, str(refused.value)
    mask = eval(remedy[1], {"torch": torch, "I": I, "u": u, "absent": value})
    assert torch.equal(mask, keep(value))
    assert capsfast.identify(kept_by(lambda mask: mask), u, mask).arguments == ("mask",)


def half_detached(self: Plain, u: Tensor) -> Tensor:
    """The agreement has a gradient through the output, but none through the votes."""
    votes = self.votes(u)
    b = self.start(votes)
    for _ in range(3):
        v = squash((b.softmax(2)[..., None] * votes).sum(1))
        b = b + (votes.detach() * v[:, None]).sum(-1)
    return v


def remembering(self: Any, u: Tensor) -> Tensor:
    """Keeps its logits from call to call."""
    v: Tensor = Plain.forward(self, u)
    self.kept = (self.votes(u) * v[:, None]).sum(-1).detach()
    return v


def clamped_gradient(self: Plain, u: Tensor) -> Tensor:
    votes = Plain.votes(self, u)
    if votes.requires_grad:
        votes.register_hook(lambda gradient: gradient.clamp(-10, 10))
    return votes


def special_sample(self: Plain, u: Tensor) -> Tensor:
    v: Tensor = Plain.forward(self, u)
    return torch.where((u == 0).all(-1).all(-1)[:, None, None], torch.ones_like(v), v)


def with_offset() -> Plain:
    layer: Plain = variant(votes=lambda self, u: Plain.votes(self, u) + self.offset)
    layer.offset = nn.Parameter(torch.zeros(J, D))
    return layer


def iterations(number: Callable[[Tensor], int]) -> Callable[[], nn.Module]:
    """A layer that chooses the number of iterations by its input."""
    return lambda: variant(forward=lambda self, u: Plain.forward(self, u, number(u)))


OTHER_MODE = "it computes something else in training mode than in evaluation mode"
BRANCH = "its forward branches on numbers in a tensor"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "drawn logits": (lambda: variant(start=lambda self, votes: torch.randn(votes.shape[:3])), "draws random numbers"),
    "dropout": (
        lambda: variant(votes=lambda self, u: Plain.votes(self, F.dropout(u, 0.5, self.training))).eval(),
        "it draws random numbers .* or dropout",
    ),
    "another mode": (lambda: variant(couple=lambda self, b: b.softmax(2 - self.training)), OTHER_MODE),
    "a state": (
        lambda: variant(
            start=lambda self, votes: getattr(self, "kept", torch.zeros(votes.shape[:3])), forward=remembering
        ),
        "torch cannot trace it",
    ),
    "no gradient": (lambda: variant(forward=torch.no_grad()(Plain.forward)), "its output has no gradient"),
    "half detached": (
        lambda: variant(forward=half_detached),
        "its gradient goes neither through all iterations nor through the last",
    ),
    "over the batch": (lambda: variant(couple=lambda self, b: b.softmax(0)), "or a softmax over the batch"),
    "offset": (with_offset, r"depends on `offset` \[4, 5\], which is neither logits, nor a bias"),
    "mask in a buffer": (
        lambda: variant(torch.ones(I), votes=lambda self, u: Plain.votes(self, u * self.kept[:, None])),
        r"depends on `kept` \[7\], which is neither logits, nor a bias",
    ),
    "by length": (iterations(lambda u: 2 if u.norm() > 30 else 3), BRANCH),
    "by mean": (iterations(lambda u: 1 if u.mean() > 100 else 3), BRANCH),
    "by batch size": (
        iterations(lambda u: 1 if u.shape[0] > 16 else 3),
        r"its forward goes by the number B of samples: B <= 16",
    ),
    "nan_to_num": (lambda: variant(votes=lambda self, u: Plain.votes(self, u.nan_to_num())), "applies .*nan_to_num"),
    "clamp": (lambda: variant(votes=lambda self, u: Plain.votes(self, u.clamp(-1000, 1000))), "applies clamp"),
    "clamped gradient": (lambda: variant(votes=clamped_gradient), "its gradient applies clamp.* only some numbers"),
    "a special sample": (lambda: variant(forward=special_sample), "applies eq|with a sample that is 0"),
    "linear": (lambda: nn.Linear(K, J), "does not point along the sum of the votes"),
    "axes": (lambda: nn.Conv1d(I, 3, 2), "do not have the axes of one routing"),
    "TorchScript": (lambda: torch.jit.trace(Plain(), example()), "TorchScript, which torch can't trace; identify the "),
    "TorchScript inside": (lambda: nn.Sequential(torch.jit.trace(Plain(), example())), "its forward is TorchScript"),
    "no fit": (lambda: Plain(2, 3, 4, 5), "a float64 copy of it fails on u, with RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(NotReproduced, match=rf"^capsfast\.identify: \w+ is not reproduced: .*{reason}"):
        capsfast.identify(make(), example())


# Layers that change the result by a further argument, which is not about input capsules, and the argument.
NO_PADDING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "flags of output capsules": (lambda v, gone: v * (1.0 - gone.double())[..., None], torch.rand(5, J) > 0.5),
    "flags of samples": (lambda v, gone: v * (1.0 - gone.double())[:, None, None], torch.arange(5) > 2),
    "classes": (lambda v, classes: v * F.one_hot(classes, J)[..., None], torch.arange(5) % J),
    "indices": (lambda v, users: torch.tanh(v * torch.eye(J)[users, :, None]), torch.arange(5) % J),
}


@pytest.mark.parametrize("name", NO_PADDING)
def test_what_is_not_about_input_capsules_is_not_called_padding(name: str) -> None:
    change, argument = NO_PADDING[name]
    layer = variant(forward=lambda self, u, other: change(Plain.forward(self, u), other))
    with pytest.raises(NotReproduced, match=r"its output does not point along|a squash that capsfast has") as refused:
        capsfast.identify(layer, example(), argument)
    assert "argument 2" not in str(refused.value)


def test_no_grad_inside_is_the_gradient_of_the_last_iteration() -> None:
    def forward(self: Plain, u: Tensor) -> Tensor:
        votes = self.votes(u)
        b = self.start(votes)
        with torch.no_grad():
            for _ in range(2):
                b = b + (votes * squash((b.softmax(2)[..., None] * votes).sum(1))[:, None]).sum(-1)
        return squash((b.softmax(2)[..., None] * votes).sum(1))

    layer = variant(forward=forward)
    found = capsfast.identify(layer, example())
    assert found.options == {"gradient": "last"}
    reproduced(found, layer, example())


def test_number_of_iterations_as_an_argument() -> None:
    layer, u = Plain(), example()
    assert capsfast.identify(layer, u, call=lambda layer, u: layer(u, 2)).num_iterations == 2
    found = capsfast.identify(layer, u, 5)  # the batch size too
    assert (found.num_iterations, found.arguments) == (5, ("constant",))
    assert "argument 2 counts as a constant" in found.describe()
    # One iteration of two inputs and two outputs: both softmaxes give 1/2, and no agreement has a gradient.
    found = capsfast.identify(Plain(2, 2, D, K), torch.randn(3, 2, K), call=lambda layer, u: layer(u, 1))
    assert found.options == {"num_iterations": 1}


def test_part_of_the_output() -> None:
    def forward(self: Plain, u: Tensor) -> Any:
        v = Plain.forward(self, u)
        return v.norm(dim=-1), v, {"v": v}

    layer, u = variant(forward=forward), example()
    found = capsfast.identify(layer, u)
    assert found.entries == ("lengths", "output", "other") and "entry 0 of the tuple is the lengths" in found.describe()
    assert capsfast.identify(layer, u, output=lambda found: found[2]["v"]) == Identification(
        "W", "IJDK", "BIK", "BJD", found.sizes
    )
    with pytest.raises(NotReproduced, match="the output is a dict, not a tensor; output= says which part"):
        capsfast.identify(layer, u, output=lambda found: found[2])


def test_another_shape_for_one_sample_is_noted() -> None:
    found = capsfast.identify(variant(forward=lambda self, u: Plain.forward(self, u).squeeze()), example(1))
    assert found.output_order == "BJD"
    assert found.notes == ("for a single sample the layer gives [4, 5], the call [1, 4, 5]",)


def test_a_linear_layer_makes_a_shared_weight() -> None:
    layer = variant(votes=lambda self, u: self.to_votes(u).unflatten(2, (J, D)))
    del layer.W
    layer.to_votes = nn.Linear(K, J * D, bias=False)
    found = capsfast.identify(layer, example())
    assert (found.weight, found.weight_order) == ("to_votes.weight", "(JD)K")
    assert "shared by all input capsules" in found.describe()
    reproduced(found, layer, example())


def old(self: Plain, u: Tensor) -> Tensor:
    """A layer whose logits always have one dtype, and whose product does not mix dtypes."""
    votes = self.votes(u)
    b = torch.FloatTensor(*votes.shape[:3]).zero_()
    for _ in range(3):
        v = squash(torch.einsum("bij,bijd->bjd", b.softmax(2), votes))
        b = b + (votes * v[:, None]).sum(-1)
    return v


def test_other_dtypes() -> None:
    paper = capsfast.identify(Plain(), example())
    assert not paper.options
    # A float32 model with an input of another dtype, for example from autocast.
    for layer in (Plain().bfloat16(), Plain()):
        assert capsfast.identify(layer, example().bfloat16()) == paper
    by_name = variant(forward=lambda self, u: Plain.forward(self, u.float()).to(torch.float32))
    found = capsfast.identify(by_name, example())
    assert found == paper and found.forward_difference < 1e-14
    with pytest.raises(NotReproduced, match="a float64 copy of it fails on u"):
        capsfast.identify(variant(forward=old), example())


def test_wrapped_layers() -> None:
    u = example()
    paper = capsfast.identify(nn.DataParallel(Plain()), u)
    assert not paper.options
    compiled = torch.compile(Plain().requires_grad_(False))
    assert capsfast.identify(compiled, u) == paper and set(paper.tensors(compiled)) == {"W"}
    assert not compiled.W.requires_grad


def test_layers_of_capsfast() -> None:
    layer = capsfast.DynamicRouting(I, J, K, D, learned_logits=True, bias=True, leaky=True, eps=1e-6)
    found = capsfast.identify(layer, example())
    assert (found.weight, found.logits, found.bias) == ("W", "routing.logits", "routing.bias")
    assert found.options == {"leaky": True, "eps": 1e-6}


def test_inputs_on_which_layers_say_little() -> None:
    """Zeros, for which a layer without eps gives NaN, and numbers that saturate the squash."""
    row = next(row for row in PUBLISHED if row.name == "no eps")
    found = capsfast.identify(row.make(), torch.zeros_like(row.example()[0]))
    assert found.options == {"eps": 1e-20, "num_iterations": 1}
    assert found.notes == ("on u the layer gives numbers that are not finite, so only random ones were compared",)
    assert not capsfast.identify(Plain(), torch.zeros(5, I, K)).options
    layer, u = Plain(200, 10, 16, 8), 5 * torch.randn(3, 200, 8)
    layer.W.data.normal_()
    assert (layer(u).norm(dim=-1) > 0.999).all()
    found = capsfast.identify(layer, u)
    assert not found.options and found.gradient_difference < 1e-8


def recording(self: Any, u: Tensor) -> Tensor:
    """Keeps its input, with its gradient, in an attribute and in a buffer."""
    self.last = Plain.forward(self, u)
    self.kept = self.last.detach().norm(dim=-1).mean(0)
    return self.last  # type: ignore[no-any-return]


def test_nothing_is_disturbed() -> None:
    """The layer, u, random numbers, gradients, and the torch.zeros of another thread stay unchanged."""
    layer, u = variant(torch.zeros(J), forward=recording).eval(), example()
    layer(u).sum().backward()
    called: list[nn.Module] = []
    layer.register_forward_hook(lambda module, *_: called.append(module))
    last, gradient, state = layer.last, layer.W.grad, copy.deepcopy(layer.state_dict())
    values, numbers, before = gradient.clone(), torch.get_rng_state(), u.clone()
    stop, dtypes = threading.Event(), set()

    def work() -> None:
        while not stop.is_set():
            dtypes.add(torch.zeros(1).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with torch.no_grad():
            found = capsfast.identify(layer, u.requires_grad_())
    finally:
        stop.set()
        thread.join()
    assert dtypes == {torch.float32}
    assert found.notes == (
        "modules in it have hooks, which the call leaves out",
        "its forward changes kept, last, the call does not",
    )
    assert layer.last is last and last.grad_fn is not None
    assert layer.W.grad is gradient and torch.equal(gradient, values) and u.grad is None
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
    assert not layer.training and not called and layer.W.dtype == torch.float32
    assert torch.equal(torch.get_rng_state(), numbers) and torch.equal(u, before)
    drawing = REFUSED["drawn logits"][0]()
    numbers = torch.get_rng_state()
    with pytest.raises(NotReproduced):
        capsfast.identify(drawing, u)
    assert torch.equal(torch.get_rng_state(), numbers)


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
    """By as much as the page says."""
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
