"""Bad input: the error has the right type, and its message names the op, the rule and the value."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import capsfast
import capsfast.distributed
from capsfast import compat, models, nn
from capsfast.calls import checks

B, I, J, D, K = 2, 3, 4, 5, 6
zeros, ones = torch.zeros, torch.ones
f64, i64, meta = {"dtype": torch.float64}, {"dtype": torch.int64}, {"device": "meta"}
boolean = {"dtype": torch.bool}


def good(op: str) -> dict[str, Any]:
    if op == "squash":
        return {"s": torch.randn(B, D)}
    if op in ("route_votes", "votes_pass"):
        return {"votes": torch.randn(B, I, J, D)}
    return {"u": torch.randn(B, I, K), "weight": torch.randn(I, J, D, K)}


# The changed arguments, the error, and what its message says, with … for anything.
Row = tuple[dict[str, Any], type[Exception], str]
ROUTING: list[Row] = [
    ({"num_iterations": 0}, ValueError, "num_iterations must be at least 1, got 0"),
    ({"num_iterations": 3.0}, TypeError, "num_iterations must be an int, got 3.0"),
    ({"num_iterations": True}, TypeError, "num_iterations must be an int, got True"),
    ({"num_iterations": torch.tensor(3)}, TypeError, "num_iterations must be an int, got an int64 tensor []"),
    ({"softmax": "over"}, ValueError, "softmax must be one of 'out', 'in', got 'over'"),
    ({"gradient": "none"}, ValueError, "gradient must be one of 'full', 'last', got 'none'"),
    ({"squash": "Paper"}, ValueError, "squash must be one of 'paper', 'half'…got 'Paper'"),
    ({"eps": 0.0}, ValueError, "eps must be positive…got 0.0; eps=1e-20 reproduces layers"),
    ({"eps": float("inf")}, ValueError, "eps must be positive and finite…got inf"),
    ({"eps": "1e-8"}, TypeError, "eps must be a number, got '1e-8'"),
    ({"leaky": 1}, TypeError, "leaky must be True or False, got 1"),
    ({"return_coupling": 1}, TypeError, "return_coupling must be True or False, got 1"),
    ({"squash_last": 1}, TypeError, "squash_last must be True or False, got 1"),
    ({"backend": "gpu"}, ValueError, "backend must be one of…got 'gpu'"),
    ({"logits": zeros(J, I)}, ValueError, "logits must be [I, J] = [3, 4] or [B, I, J] = [2, 3, 4], got [4, 3]"),
    ({"logits": zeros(B + 1, I, J)}, ValueError, "logits must be [I, J]…= [2, 3, 4], got [3, 3, 4]"),
    ({"logits": zeros(J)}, ValueError, "logits must have shape [I, J]…got [4]"),
    ({"logits": [[0.0]]}, TypeError, "logits must be a torch.Tensor [I, J]…got list"),
    ({"logits": zeros(I, J, **i64)}, TypeError, "logits must be float32, float64, bfloat16 or float16, got int64"),
    ({"logits": zeros(I, J, **f64)}, TypeError, "logits must have the dtype of…got float64"),
    ({"logits": zeros(I, J, **meta)}, ValueError, "all tensors must be on one device…logits on meta"),
    ({"bias": zeros(D, J)}, ValueError, "bias must be [J, D] = [4, 5], got [5, 4]"),
    ({"bias": zeros(D)}, ValueError, "bias must have shape [J, D], got [5]"),
    ({"bias": zeros(J, D).bfloat16()}, TypeError, "bias must have the dtype of…got bfloat16"),
    ({"bias": zeros(J, D, dtype=torch.complex64)}, TypeError, "bias must be float32…got complex64"),
    ({"mask": ones(B, I)}, TypeError, "mask must be bool (True = use), got float32"),
    ({"mask": ones(B, J, **boolean)}, ValueError, "mask must be [B, I] = [2, 3], got [2, 4]"),
    ({"mask": ones(I, **boolean)}, ValueError, "mask must have shape [B, I], got [3]"),
    ({"mask": ones(B, I, **boolean, **meta)}, ValueError, "all tensors must be on one device…mask on meta"),
    ({"out_mask": ones(B, I, **boolean)}, ValueError, "out_mask must be [B, J] = [2, 4], got [2, 3]"),
]
OF_A_WEIGHT: list[Row] = [
    ({"u": np.zeros((B, I, K))}, TypeError, "u must be a torch.Tensor [B, I, K]…got ndarray"),
    ({"u": zeros(I, K)}, ValueError, "u must have shape [B, I, K]…got [3, 6]"),
    ({"u": zeros(B, I, K, 1, 1)}, ValueError, "u must have shape [B, I, K]…[2, 3, 6, 1, 1]"),
    ({"u": zeros(B, I, K, 1)}, ValueError, "weight must be [I, J, Q, R] with Q=1…got 5"),
    ({"u": zeros(B, I, K, **i64)}, TypeError, "u must be float32, float64, bfloat16 or float16, got int64"),
    ({"u": zeros(B, I, K).to_sparse()}, TypeError, "u must be a dense tensor, got layout torch.sparse_coo"),
    ({"u": zeros(B, I, K, **f64)}, TypeError, "u and weight must have one dtype, got float64"),
    ({"u": zeros(B, I, K, **meta)}, ValueError, "all tensors must be on one device, got u on meta and weight on cpu"),
    ({"weight": zeros(J, D, K)}, ValueError, "weight must have shape [I, J, D, K]…got [4, 5, 6]"),
    ({"weight": zeros(I - 1, J, D, K)}, ValueError, "weight must have 1 or I=3 rows, got 2 (weight [2, 4, 5, 6], …"),
    ({"weight": zeros(I, J, K, D)}, ValueError, "weight must end in K=6…got 5 (weight [3, 4, 6, 5], u [2, 3, 6])"),
    ({"weight": zeros(I, J, D, K).half()}, TypeError, "u and weight must have one dtype, got float32 and float16"),
]
OF_VOTES: list[Row] = [
    ({"votes": zeros(I, J, D)}, ValueError, "votes must have shape [B, I, J, D]…got [3, 4, 5]"),
    ({"votes": zeros(B, I, J, D).to(torch.float8_e5m2)}, TypeError, "votes must be float32…got float8_e5m2"),
    ({"votes": zeros(B, I, J, D).to_sparse()}, TypeError, "votes must be a dense tensor, got layout torch.sparse_coo"),
]
PASS: list[Row] = [
    ({"prior": zeros(B, I)}, ValueError, "prior must be [B, J] = [2, 4], got [2, 3]"),
    ({"normalize": "lse"}, ValueError, "lse must be given…got none"),
    ({"lse": zeros(B, I)}, ValueError, "lse must be given…normalize='out'"),
    ({"lse": zeros(B, J), "normalize": "lse"}, ValueError, "lse must be [B, I] = [2, 3], got [2, 4]"),
    ({"normalize": "softmax"}, ValueError, "normalize must be one of 'out', 'in', 'sigmoid', 'none', 'lse', got 'soft"),
    ({"leaky": True, "normalize": "sigmoid"}, ValueError, 'normalize must be "out" or "in"…got \'sigmoid\''),
    ({"second": None}, TypeError, "second must be True or False, got None"),
    ({"return_lse": 1}, TypeError, "return_lse must be True or False, got 1"),
    ({"return_lse": True, "normalize": "none"}, ValueError, "return_lse needs a softmax…got 'none'"),
    ({"query": zeros(J, D)}, ValueError, "query must have shape [B, J, D], got [4, 5]"),
    ({"query": zeros(B, J, D + 1)}, ValueError, "query must be [B, J, D] = [2, 4, 5], got [2, 4, 6]"),
    ({"query": zeros(B, J, D, **f64)}, TypeError, "query must have the dtype of…got float64"),
    ({"query": zeros(B, J, D, **meta)}, ValueError, "all tensors must be on one device…query on meta"),
    ({"precision": -ones(B, J, D)}, ValueError, "precision, an inverse variance, must not be negative, got -1"),
    ({"center": zeros(B, I, D)}, ValueError, "center must be [B, J, D]…got [2, 3, 5]"),
    ({"activation": zeros(B, I, 1)}, ValueError, "activation must have shape [B, I], got [2, 3, 1]"),
]
# All functions share their checks. So route_votes and votes_pass have few rows, which show that they check the rest.
TABLE: list[tuple[str, Row]] = [
    *(("dynamic_routing", row) for row in (*ROUTING, *OF_A_WEIGHT)),
    *(("route_votes", row) for row in (*OF_VOTES, ROUTING[0], ROUTING[15], ROUTING[26])),
    *(("routing_pass", row) for row in PASS),
    *(("votes_pass", row) for row in PASS[:2]),
    ("squash", ({"s": [1.0]}, TypeError, "s must be a torch.Tensor…got list")),
    ("squash", ({"s": ones(3, **i64)}, TypeError, "s must be float32…got int64")),
    ("squash", ({"dim": 2}, IndexError, "dim must be in [-2, 1]…got 2")),
    ("squash", ({"kind": "cubic"}, ValueError, "kind must be one of 'paper'…got 'cubic'")),
    ("squash", ({"eps": 0}, ValueError, "eps must be positive…got 0")),
]


@pytest.mark.rows(len(TABLE))
@pytest.mark.parametrize(("op", "row"), TABLE, ids=[f"{op} {row[2]}" for op, row in TABLE])
def test_messages(op: str, row: Row) -> None:
    arguments, error, said = row
    with pytest.raises(error) as caught:
        getattr(capsfast, op)(**(good(op) | arguments))
    message = str(caught.value)
    assert type(caught.value) is error
    assert re.search(f"^capsfast.{op}: .*" + ".*".join(map(re.escape, said.split("…"))), message), message
    assert not re.search(r"\{|None \(|  ", message), f"a message that was not filled in: {message}"


def test_options_are_keyword_only() -> None:
    arguments = good("dynamic_routing")
    with pytest.raises(TypeError, match="positional"):
        capsfast.dynamic_routing(arguments["u"], arguments["weight"], 3, torch.zeros(I, J))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.randn(16, 1152, 8), "a float32 tensor [16, 1152, 8]"),
        (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)), "a float64 tensor [2]"),
        (np.zeros((2, 3), dtype=np.int32), "an int32 array [2, 3]"),
        (torch.nn.Linear(2, 3), "Linear"),
        (torch.nn.Linear, "Linear"),
        (capsfast.Moments(torch.ones(2), torch.ones(2)), f"({'a float32 tensor [2], ' * 2}None, None, None)"),
        ({"a": [torch.ones(2)] * 9}, f"{{'a': [{'a float32 tensor [2], ' * 6}...]}}"),
        (torch.Size([3, 28, 28]), "(3, 28, 28)"),
        ("paper", "'paper'"),
        (np.float32(0.5), repr(np.float32(0.5))),
        (torch.float16, "torch.float16"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_how_messages_show_a_value(value: object, said: str) -> None:
    assert checks.shown(value) == said


@pytest.mark.parametrize(
    "value",
    ["x" * 10_000, list(range(10_000)), [["x" * 99] * 99] * 99, 10**999],
    ids=lambda value: type(value).__name__,
)
def test_messages_show_a_bounded_part_of_a_long_value(value: object) -> None:
    assert len(checks.shown(value)) <= checks.LONGEST and "..." in checks.shown(value)


def test_transposed_input_capsules() -> None:
    em, foreign = nn.RoutedCaps(I, J, K, D, routing="em"), compat.DenseCapsule(I, K, J, D)
    functions: list[Callable[..., Any]] = [capsfast.DynamicRouting(I, J, K, D), em, foreign]
    for rows in (1, I):
        functions += [lambda u, rows=rows: capsfast.dynamic_routing(u, zeros(rows, J, D, K))]
        functions += [lambda u, rows=rows: capsfast.routing_pass(u, zeros(rows, J, D, K))]
    for function in functions:
        u, name = zeros(B, K, I), "x" if function is foreign else "u"
        with pytest.raises(ValueError, match=rf"got .*; {name} looks transposed: give {name}.transpose\(1, 2\)$"):
            function(u)
        function(u.transpose(1, 2))


GIVEN_U, VOTES = tuple(good("u").values()), tuple(good("route_votes").values())
# The keyword, the function, its arguments, the name in the message, and the suggested argument.
MISSPELLED: list[tuple[str, Callable[..., Any], tuple[Any, ...], str, str]] = [
    ("iterations", capsfast.dynamic_routing, GIVEN_U, "dynamic_routing", "num_iterations"),
    ("num_routing", capsfast.route_votes, VOTES, "route_votes", "num_iterations"),
    ("iters", capsfast.distributed.dynamic_routing, GIVEN_U, "distributed.dynamic_routing", "num_iterations"),
    ("sofmax", capsfast.dynamic_routing, GIVEN_U, "dynamic_routing", "softmax"),
    ("activations", capsfast.routing_pass, GIVEN_U, "routing_pass", "activation"),
    ("alpha", capsfast.dynamic_routing, GIVEN_U, "dynamic_routing", ""),
    ("num_routings", capsfast.DynamicRouting, (I, J, K, D), "DynamicRouting", "num_iterations"),
    ("in_capsules", capsfast.DynamicRouting, (), "DynamicRouting", "in_caps"),
    ("routing_iters", nn.ConvCaps2d, (1, 1, 4, 4), "DynamicRouting", "num_iterations"),
    ("num_iteration", models.CapsNet, (), "DynamicRouting", "num_iterations"),
    ("reductions", nn.SpreadLoss, (), "nn.SpreadLoss", "reduction"),
]


@pytest.mark.parametrize(
    ("name", "function", "arguments", "op", "own"), MISSPELLED, ids=[f"{row[3]} {row[0]}" for row in MISSPELLED]
)
def test_a_keyword_that_is_misspelled(
    name: str, function: Callable[..., Any], arguments: tuple[Any, ...], op: str, own: str
) -> None:
    with pytest.raises(TypeError) as caught:
        function(*arguments, **{name: 3})
    message = str(caught.value)
    assert message.startswith(f"capsfast.{op}: ") and name in message, message
    assert (f" (did you mean {own}?)" in message) if own else ("did you mean" not in message), message


def test_functions_show_the_keywords_they_have() -> None:
    for op in ("dynamic_routing", "route_votes", "routing_pass", "votes_pass"):
        parameters = inspect.signature(getattr(capsfast, op)).parameters
        assert list(parameters)[-1] == "backend"
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            getattr(capsfast, op)(**{"u": 1} if "u" in parameters else {})
