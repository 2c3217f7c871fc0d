"""The call that an Identification describes: orders of axes, text, copies."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsfast
from capsfast.adopt import Identification, Sizes

SIZES = Sizes(6, 4, 5, 3)
B, I, J, D, K = 2, *SIZES


def rand(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def identification(order: str = "IJDK", given: str = "BIK", out: str = "BJD", **options: Any) -> Identification:
    return Identification("w", order, given, out, SIZES, **options)


def test_votes_logits_bias_and_mask() -> None:
    votes, prior, bias, mask = rand(B, I, J, D), rand(J), rand(D, J), torch.tensor([[1.0, 0, 1, 1, 0, 1]] * B)
    found = Identification(
        None, "", "BJID1", "BJD", SIZES, 2, logits="a.b", logits_order="J", bias="c", bias_order="DJ",
        arguments=("unused", "mask"), argument_orders=("", "BI"),
    )  # fmt: skip
    got = found({"a.b": prior, "c": bias}, votes.transpose(1, 2)[..., None], None, mask)
    wanted = capsfast.route_votes(votes, 2, logits=prior.expand(I, J), bias=bias.T, mask=mask.bool())
    assert torch.equal(got, wanted)


def test_code_is_the_call() -> None:
    layer = nn.Module()
    layer.register_parameter("w", nn.Parameter(rand(I, K, J * D)))
    layer.register_buffer("b", rand(1, I, J))
    names = {"layer": layer, "x": rand(B, K, I), "capsfast": capsfast, "mask": torch.rand(B, I) > 0.3}
    found = identification(
        "IK(JD)", "BKI", "B1JD", num_iterations=2, softmax="in", eps=1e-20, logits="b", logits_order="1IJ",
        arguments=("mask",), argument_orders=("BI",),
    )  # fmt: skip
    exec(found.code(u="x"), names)
    wanted = found(found.tensors(layer), names["x"], names["mask"])  # type: ignore[arg-type]
    assert wanted.shape == (B, 1, J, D) and torch.equal(names["v"], wanted)  # type: ignore[arg-type]
    assert found.code() in str(found).replace("\n  ", "\n")


def test_words() -> None:
    assert "all options are as in the paper" in identification().describe()
    words = identification("JDK", softmax="in", gradient="last", eps=1e-20, notes=("seen",)).describe()
    for each in (
        "weight `w` [J, D, K], shared by all input capsules, I=6, J=4, D=5, K=3, 3 iterations",
        "softmax over the input capsules: not the paper's",
        "gradient through the last iteration only",
        "eps of the squash 1e-20 (the layer adds none); the default is 1e-08",
        "note: seen",
        "capsfast.dynamic_routing(u, weight, softmax='in', gradient='last', eps=1e-20)",
    ):
        assert each in words


def test_it_is_a_value() -> None:
    found = identification(softmax="in")
    assert found == identification(softmax="in", forward_difference=1e-12, notes=("seen",))
    assert found != identification()
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert twin == found and hash(twin) == hash(found)


def test_what_an_older_version_saved_is_bound_again() -> None:
    identified, w, u = identification("JIKD", "BKI"), rand(J, I, K, D), rand(B, K, I)
    older = Identification.__new__(Identification)
    bound = ("names", "_reads", "_output_steps", "_coupling_steps")
    older.__setstate__({name: value for name, value in vars(identified).items() if name not in bound})
    assert torch.equal(older({"w": w}, u), identified({"w": w}, u))


def test_one_graph() -> None:
    found, w, u = identification("JIKD", "BKI"), rand(J, I, K, D), rand(B, K, I)
    compiled = torch.compile(lambda w, u: found({"w": w}, u), fullgraph=True, backend="eager")
    assert torch.equal(compiled(w, u), found({"w": w}, u))


def test_tensors_that_do_not_fit() -> None:
    found, w = identification("1IJDK", "BIK1"), rand(1, I, J, D, K)
    with pytest.raises(ValueError, match=r"u must be \[B, I, K, 1\], got \[2, 6, 3, 2\]"):
        found({"w": w}, rand(B, I, K, 2))
    with pytest.raises(ValueError, match=r"w must be \[1, I, J, D, K\], got \[6, 4, 5, 3\]"):
        found({"w": w[0]}, rand(B, I, K, 1))
    with pytest.raises(TypeError, match=r"u must be a torch\.Tensor"):
        found({"w": w}, [1.0])  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="w"):
        found({}, rand(B, I, K, 1))
    with pytest.raises(AttributeError, match="w"):
        found.tensors(nn.Linear(2, 2))
