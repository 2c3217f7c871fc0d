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
from capsfast import checks, compat, models, nn

B, I, J, D, K = 2, 3, 4, 5, 6


def good(op: str) -> dict[str, Any]:
    if op == "route_votes":
        return {"votes": torch.randn(B, I, J, D)}
    return {"u": torch.randn(B, I, K), "weight": torch.randn(I, J, D, K)}


# name: the changed arguments, the error, the rule in the message, the value in the message
Row = tuple[Callable[[], dict[str, Any]], type[Exception], str, str]
SHARED: dict[str, Row] = {
    "iterations zero": (lambda: {"num_iterations": 0}, ValueError, "num_iterations must be at least 1", "got 0"),
    "iterations float": (lambda: {"num_iterations": 3.0}, TypeError, "num_iterations must be an int", "got 3.0"),
    "iterations bool": (lambda: {"num_iterations": True}, TypeError, "num_iterations must be an int", "got True"),
    "iterations tensor": (
        lambda: {"num_iterations": torch.tensor(3)},
        TypeError,
        "num_iterations must be an int",
        "got an int64 tensor []",
    ),
    "softmax": (lambda: {"softmax": "over"}, ValueError, "softmax must be one of 'out', 'in'", "got 'over'"),
    "gradient": (lambda: {"gradient": "none"}, ValueError, "gradient must be one of 'full', 'last'", "got 'none'"),
    "squash": (lambda: {"squash": "Paper"}, ValueError, "squash must be one of 'paper', 'half'", "got 'Paper'"),
    "eps zero": (lambda: {"eps": 0.0}, ValueError, "eps must be positive", "got 0.0; eps=1e-20 reproduces layers"),
    "eps inf": (lambda: {"eps": float("inf")}, ValueError, "eps must be positive and finite", "got inf"),
    "eps text": (lambda: {"eps": "1e-8"}, TypeError, "eps must be a number", "got '1e-8'"),
    "leaky": (lambda: {"leaky": 1}, TypeError, "leaky must be True or False", "got 1"),
    "return_coupling": (lambda: {"return_coupling": 1}, TypeError, "return_coupling must be True or False", "got 1"),
    "squash_last": (lambda: {"squash_last": 1}, TypeError, "squash_last must be True or False", "got 1"),
    "backend": (lambda: {"backend": "gpu"}, ValueError, "backend must be one of", "got 'gpu'"),
    "logits shape": (
        lambda: {"logits": torch.zeros(J, I)},
        ValueError,
        "logits must be [I, J] = [3, 4] or [B, I, J] = [2, 3, 4]",
        "got [4, 3]",
    ),
    "logits batch": (
        lambda: {"logits": torch.zeros(B + 1, I, J)},
        ValueError,
        "logits must be [I, J] = [3, 4] or [B, I, J] = [2, 3, 4]",
        "got [3, 3, 4]",
    ),
    "logits rank": (lambda: {"logits": torch.zeros(J)}, ValueError, "logits must have shape [I, J]", "got [4]"),
    "logits list": (lambda: {"logits": [[0.0]]}, TypeError, "logits must be a torch.Tensor [I, J]", "got list"),
    "logits integer": (
        lambda: {"logits": torch.zeros(I, J, dtype=torch.int64)},
        TypeError,
        "logits must be float32, float64, bfloat16 or float16",
        "got int64",
    ),
    "logits dtype": (
        lambda: {"logits": torch.zeros(I, J, dtype=torch.float64)},
        TypeError,
        "logits must have the dtype of",
        "got float64",
    ),
    "logits device": (
        lambda: {"logits": torch.zeros(I, J, device="meta")},
        ValueError,
        "all tensors must be on one device",
        "logits on meta",
    ),
    "bias shape": (lambda: {"bias": torch.zeros(D, J)}, ValueError, "bias must be [J, D] = [4, 5]", "got [5, 4]"),
    "bias rank": (lambda: {"bias": torch.zeros(D)}, ValueError, "bias must have shape [J, D]", "got [5]"),
    "bias dtype": (
        lambda: {"bias": torch.zeros(J, D, dtype=torch.bfloat16)},
        TypeError,
        "bias must have the dtype of",
        "got bfloat16",
    ),
    "bias complex": (
        lambda: {"bias": torch.zeros(J, D, dtype=torch.complex64)},
        TypeError,
        "bias must be float32",
        "got complex64",
    ),
    "bias device": (
        lambda: {"bias": torch.zeros(J, D, device="meta")},
        ValueError,
        "all tensors must be on one device",
        "bias on meta",
    ),
    "mask dtype": (lambda: {"mask": torch.ones(B, I)}, TypeError, "mask must be bool", "got float32"),
    "mask uint8": (
        lambda: {"mask": torch.ones(B, I, dtype=torch.uint8)},
        TypeError,
        "mask must be bool (True = use)",
        "got uint8",
    ),
    "mask shape": (
        lambda: {"mask": torch.ones(B, J, dtype=torch.bool)},
        ValueError,
        "mask must be [B, I] = [2, 3]",
        "got [2, 4]",
    ),
    "mask rank": (
        lambda: {"mask": torch.ones(I, dtype=torch.bool)},
        ValueError,
        "mask must have shape [B, I]",
        "got [3]",
    ),
    "mask device": (
        lambda: {"mask": torch.ones(B, I, dtype=torch.bool, device="meta")},
        ValueError,
        "all tensors must be on one device",
        "mask on meta",
    ),
    "out_mask shape": (
        lambda: {"out_mask": torch.ones(B, I, dtype=torch.bool)},
        ValueError,
        "out_mask must be [B, J] = [2, 4]",
        "got [2, 3]",
    ),
}
DYNAMIC_ROUTING: dict[str, Row] = SHARED | {
    "u array": (lambda: {"u": np.zeros((B, I, K))}, TypeError, "u must be a torch.Tensor [B, I, K]", "got ndarray"),
    "u rank 2": (lambda: {"u": torch.zeros(I, K)}, ValueError, "u must have shape [B, I, K]", "got [3, 6]"),
    "u rank 5": (
        lambda: {"u": torch.zeros(B, I, K, 1, 1)},
        ValueError,
        "u must have shape [B, I, K]",
        "[2, 3, 6, 1, 1]",
    ),
    "u rank 4": (lambda: {"u": torch.zeros(B, I, K, 1)}, ValueError, "weight must be [I, J, Q, R] with Q=1", "got 5"),
    "u integer": (
        lambda: {"u": torch.zeros(B, I, K, dtype=torch.int32)},
        TypeError,
        "u must be float32, float64, bfloat16 or float16",
        "got int32",
    ),
    "u complex": (
        lambda: {"u": torch.zeros(B, I, K, dtype=torch.complex64)},
        TypeError,
        "u must be float32, float64, bfloat16 or float16",
        "got complex64",
    ),
    "u sparse": (
        lambda: {"u": torch.zeros(B, I, K).to_sparse()},
        TypeError,
        "u must be a dense tensor",
        "got layout torch.sparse_coo",
    ),
    "u dtype": (
        lambda: {"u": torch.zeros(B, I, K).double()},
        TypeError,
        "u and weight must have one dtype",
        "got float64",
    ),
    "u device": (
        lambda: {"u": torch.zeros(B, I, K, device="meta")},
        ValueError,
        "all tensors must be on one device",
        "got u on meta and weight on cpu",
    ),
    "weight rank": (
        lambda: {"weight": torch.zeros(J, D, K)},
        ValueError,
        "weight must have shape [I, J, D, K]",
        "got [4, 5, 6]",
    ),
    "weight rows": (
        lambda: {"weight": torch.zeros(I - 1, J, D, K)},
        ValueError,
        "weight must have 1 or I=3 rows",
        "got 2 (weight [2, 4, 5, 6], u [2, 3, 6])",
    ),
    "weight columns": (
        lambda: {"weight": torch.zeros(I, J, K, D)},
        ValueError,
        "weight must end in K=6",
        "got 5 (weight [3, 4, 6, 5], u [2, 3, 6])",
    ),
    "weight dtype": (
        lambda: {"weight": torch.zeros(I, J, D, K).half()},
        TypeError,
        "u and weight must have one dtype",
        "got float32 and float16",
    ),
}
ROUTE_VOTES: dict[str, Row] = {
    "votes rank": (
        lambda: {"votes": torch.zeros(I, J, D)},
        ValueError,
        "votes must have shape [B, I, J, D]",
        "got [3, 4, 5]",
    ),
    "votes float8": (
        lambda: {"votes": torch.zeros(B, I, J, D).to(torch.float8_e5m2)},
        TypeError,
        "votes must be float32",
        "got float8_e5m2",
    ),
    "votes sparse": (
        lambda: {"votes": torch.zeros(B, I, J, D).to_sparse()},
        TypeError,
        "votes must be a dense tensor",
        "got layout torch.sparse_coo",
    ),
}
SQUASH: dict[str, Row] = {
    "s list": (lambda: {"s": [1.0]}, TypeError, "s must be a torch.Tensor", "got list"),
    "s integer": (lambda: {"s": torch.ones(3, dtype=torch.int64)}, TypeError, "s must be float32", "got int64"),
    "dim": (lambda: {"dim": 2}, IndexError, "dim must be in [-2, 1]", "got 2"),
    "kind": (lambda: {"kind": "cubic"}, ValueError, "kind must be one of 'paper'", "got 'cubic'"),
    "eps": (lambda: {"eps": 0}, ValueError, "eps must be positive", "got 0"),
}


def expect(function: Callable[..., Any], op: str, arguments: dict[str, Any], row: Row) -> None:
    _, error, rule, got = row
    with pytest.raises(error) as caught:
        function(**arguments)
    message = str(caught.value)
    assert message.startswith(f"capsfast.{op}: "), message
    assert rule in message, message
    assert got in message, message
    assert type(caught.value) is error
    assert not re.search(r"\{|None \(|  ", message), f"a message that was not filled in: {message}"


# All functions share their checks. So route_votes has its own rules, and one row that shows that it checks the rest.
TABLES = {
    "dynamic_routing": DYNAMIC_ROUTING,
    "route_votes": ROUTE_VOTES
    | {name: SHARED[name] for name in ("iterations zero", "logits batch", "mask shape", "eps inf")},
}


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, rows in TABLES.items() for name in rows])
def test_routing(op: str, name: str) -> None:
    row = TABLES[op][name]
    expect(getattr(capsfast, op), op, good(op) | row[0](), row)


@pytest.mark.parametrize("name", SQUASH)
def test_squash(name: str) -> None:
    row = SQUASH[name]
    expect(capsfast.squash, "squash", {"s": torch.ones(2, 3)} | row[0](), row)


MODULE: dict[str, Row] = {
    "in_caps": (lambda: {"in_caps": 0}, ValueError, "in_caps must be at least 1", "got 0"),
    "out_caps": (lambda: {"out_caps": 2.0}, TypeError, "out_caps must be an int", "got 2.0"),
    "iterations": (lambda: {"num_iterations": 0}, ValueError, "num_iterations must be at least 1", "got 0"),
    "softmax": (lambda: {"softmax": "both"}, ValueError, "softmax must be one of", "got 'both'"),
    "eps": (lambda: {"eps": 0.0}, ValueError, "eps must be positive", "got 0.0"),
    "leaky": (lambda: {"leaky": "no"}, TypeError, "leaky must be True or False", "got 'no'"),
}


@pytest.mark.parametrize("name", MODULE)
def test_module_rejects_when_it_is_made(name: str) -> None:
    arguments = {"in_caps": I, "out_caps": J, "in_dim": K, "out_dim": D} | MODULE[name][0]()
    expect(capsfast.DynamicRouting, "DynamicRouting", arguments, MODULE[name])


def test_module_names_its_sizes() -> None:
    layer = capsfast.DynamicRouting(I, J, K, D)
    row: Row = (dict, ValueError, "u must be [B, in_caps=3, in_dim=6]", "got [2, 4, 6]")
    expect(layer, "DynamicRouting", {"u": torch.zeros(2, 4, 6)}, row)
    with pytest.raises(ValueError, match=r"u must have shape \[B, I, K\], got \[3, 6\]"):
        layer(torch.zeros(3, 6))


def test_options_are_keyword_only() -> None:
    arguments = good("dynamic_routing")
    with pytest.raises(TypeError, match="positional"):
        capsfast.dynamic_routing(arguments["u"], arguments["weight"], 3, torch.zeros(I, J))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["num_iterations", "softmax", "eps"])
def test_checks_hold_on_meta_tensors_too(name: str) -> None:
    bad = {"num_iterations": 0, "softmax": "x", "eps": -1}[name]
    with pytest.raises(ValueError, match=name):
        capsfast.route_votes(torch.zeros(B, I, J, D, device="meta"), **{name: bad})


def good_pass(op: str) -> dict[str, Any]:
    return good("route_votes" if op == "votes_pass" else "dynamic_routing")


PASS: dict[str, Row] = {
    "normalize": (
        lambda: {"normalize": "softmax"},
        ValueError,
        "normalize must be one of 'out', 'in', 'sigmoid', 'none', 'lse'",
        "got 'softmax'",
    ),
    "leaky sigmoid": (
        lambda: {"leaky": True, "normalize": "sigmoid"},
        ValueError,
        'normalize must be "out" or "in"',
        "got 'sigmoid'",
    ),
    "second": (lambda: {"second": None}, TypeError, "second must be True or False", "got None"),
    "return_lse": (lambda: {"return_lse": 1}, TypeError, "return_lse must be True or False", "got 1"),
    "return_lse none": (
        lambda: {"return_lse": True, "normalize": "none"},
        ValueError,
        "return_lse needs a softmax",
        "got 'none'",
    ),
    "lse missing": (lambda: {"normalize": "lse"}, ValueError, "lse must be given", "got none"),
    "lse unused": (lambda: {"lse": torch.zeros(B, I)}, ValueError, "lse must be given", "normalize='out'"),
    "lse shape": (
        lambda: {"lse": torch.zeros(B, J), "normalize": "lse"},
        ValueError,
        "lse must be [B, I] = [2, 3]",
        "got [2, 4]",
    ),
    "query shape": (lambda: {"query": torch.zeros(J, D)}, ValueError, "query must have shape [B, J, D]", "got [4, 5]"),
    "query size": (
        lambda: {"query": torch.zeros(B, J, D + 1)},
        ValueError,
        "query must be [B, J, D] = [2, 4, 5]",
        "got [2, 4, 6]",
    ),
    "query dtype": (
        lambda: {"query": torch.zeros(B, J, D, dtype=torch.float64)},
        TypeError,
        "query must have the dtype of",
        "got float64",
    ),
    "query device": (
        lambda: {"query": torch.zeros(B, J, D, device="meta")},
        ValueError,
        "all tensors must be on one device",
        "query on meta",
    ),
    "precision": (
        lambda: {"precision": torch.full((B, J, D), -0.5)},
        ValueError,
        "precision, an inverse variance, must not be negative",
        "got -0.5",
    ),
    "center": (lambda: {"center": torch.zeros(B, I, D)}, ValueError, "center must be [B, J, D]", "got [2, 3, 5]"),
    "prior": (lambda: {"prior": torch.zeros(B, I)}, ValueError, "prior must be [B, J] = [2, 4]", "got [2, 3]"),
    "activation": (
        lambda: {"activation": torch.zeros(B, I, 1)},
        ValueError,
        "activation must have shape [B, I]",
        "got [2, 3, 1]",
    ),
}


@pytest.mark.parametrize(
    ("op", "name"), [*(("routing_pass", name) for name in PASS), ("votes_pass", "prior"), ("votes_pass", "lse missing")]
)
def test_passes(op: str, name: str) -> None:
    expect(getattr(capsfast, op), op, good_pass(op) | PASS[name][0](), PASS[name])


@pytest.mark.parametrize("op", ["routing_pass", "votes_pass"])
def test_shared_outputs_need_a_number(op: str) -> None:
    shared = {"votes": torch.zeros(B, I, 1, D)} if op == "votes_pass" else {"weight": torch.zeros(1, 1, D, K)}
    row: Row = (dict, ValueError, "another argument must say how many there are", "got none of query")
    expect(getattr(capsfast, op), op, good_pass(op) | shared, row)
    mixed = {"query": torch.zeros(B, J, D), "prior": torch.zeros(B, J + 1)}
    row = (dict, ValueError, "prior must be [B, J] = [2, 4]", "got [2, 5]")
    expect(getattr(capsfast, op), op, good_pass(op) | shared | mixed, row)


def test_a_backend_without_passes_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"capsfast.votes_pass: backend 'cuda' cannot serve this call"):
        capsfast.votes_pass(torch.zeros(B, I, J, D), backend="cuda")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.randn(16, 1152, 8), "a float32 tensor [16, 1152, 8]"),
        (torch.nn.Parameter(torch.ones(2, dtype=torch.float64)), "a float64 tensor [2]"),
        (np.zeros((2, 3), dtype=np.int32), "an int32 array [2, 3]"),
        (torch.nn.Linear(2, 3), "Linear"),
        (torch.nn.Linear, "Linear"),
        (
            capsfast.Moments(torch.ones(2), torch.ones(3)),
            "(a float32 tensor [2], a float32 tensor [3], None, None, None)",
        ),
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


@pytest.mark.parametrize("value", ["x" * 10_000, list(range(10_000)), [["x" * 99] * 99] * 99, 10**999])
def test_messages_show_a_bounded_part_of_a_long_value(value: object) -> None:
    assert len(checks.shown(value)) <= checks.LONGEST and "..." in checks.shown(value)


def test_route_votes_of_u_and_a_weight_names_dynamic_routing() -> None:
    arguments = good("dynamic_routing")
    with pytest.raises(TypeError) as caught:
        capsfast.route_votes(arguments["u"], arguments["weight"])
    assert str(caught.value) == (
        "capsfast.route_votes: takes votes [B, I, J, D] and a number of iterations, got a float32 tensor [2, 3, 6] and "
        "a float32 tensor [3, 4, 5, 6]; for u and a weight use capsfast.dynamic_routing"
    )


@pytest.mark.parametrize("rows", [1, I])
@pytest.mark.parametrize("op", ["dynamic_routing", "routing_pass"])
def test_transposed_input_capsules(op: str, rows: int) -> None:
    u, weight = torch.zeros(B, K, I), torch.zeros(rows, J, D, K)
    said = f"u must be [B, I, K] with K=6, got K=3 (weight [{rows}, 4, 5, 6], u [2, 6, 3]); u looks transposed: give "
    row: Row = (dict, ValueError, f"{said}u.transpose(1, 2)", "")
    expect(getattr(capsfast, op), op, {"u": u, "weight": weight}, row)
    getattr(capsfast, op)(u.transpose(1, 2), weight)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (capsfast.DynamicRouting(I, J, K, D), "u"),
        (nn.RoutedCaps(I, J, K, D, routing="em"), "u"),
        (compat.DenseCapsule(I, K, J, D), "x"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_transposed_input_capsules_of_a_layer(layer: torch.nn.Module, name: str) -> None:
    u = torch.zeros(B, K, I)
    with pytest.raises(ValueError, match=rf"got \[2, 6, 3\]; {name} looks transposed: give {name}.transpose\(1, 2\)$"):
        layer(u)
    layer(u.transpose(1, 2))
    with pytest.raises(ValueError, match=r"got \[2, 6, 12\]$"):
        layer(torch.zeros(B, K, 4 * I))


U, VOTES = tuple(good("u").values()), tuple(good("route_votes").values())
# The keyword, the function, its arguments, the name in the message, and the suggested argument.
MISSPELLED: list[tuple[str, Callable[..., Any], tuple[Any, ...], str, str]] = [
    ("iterations", capsfast.dynamic_routing, U, "dynamic_routing", "num_iterations"),
    ("routings", capsfast.dynamic_routing, U, "dynamic_routing", "num_iterations"),
    ("num_routing", capsfast.route_votes, VOTES, "route_votes", "num_iterations"),
    ("iters", capsfast.distributed.dynamic_routing, U, "distributed.dynamic_routing", "num_iterations"),
    ("sofmax", capsfast.dynamic_routing, U, "dynamic_routing", "softmax"),
    ("prioor", capsfast.votes_pass, VOTES, "votes_pass", "prior"),
    ("activations", capsfast.routing_pass, U, "routing_pass", "activation"),
    ("alpha", capsfast.dynamic_routing, U, "dynamic_routing", ""),
    ("num_routings", capsfast.DynamicRouting, (I, J, K, D), "DynamicRouting", "num_iterations"),
    ("in_capsules", capsfast.DynamicRouting, (), "DynamicRouting", "in_caps"),
    ("n_iterations", nn.RoutedCaps, (I, J, K, D), "nn.RoutedCaps", "num_iterations"),
    ("routing_iters", nn.ConvCaps2d, (1, 1, 4, 4), "DynamicRouting", "num_iterations"),
    ("num_iteration", models.CapsNet, (), "DynamicRouting", "num_iterations"),
    ("reductions", nn.SpreadLoss, (), "nn.SpreadLoss", "reduction"),
    ("alpha", nn.SpreadLoss, (), "nn.SpreadLoss", ""),
]


@pytest.mark.parametrize(("name", "function", "arguments", "op", "own"), MISSPELLED)
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


def public() -> dict[str, Callable[..., Any]]:
    """Functions, layers and networks."""
    names = ("squash", "dynamic_routing", "route_votes", "routing_pass", "votes_pass", "use_backend")
    found = {name: getattr(capsfast, name) for name in (*names, "diagnose", "accelerate", "identify")}
    for part in (nn, models, compat):
        for name in part.__all__:
            each = getattr(part, name)
            if inspect.isfunction(each) or (inspect.isclass(each) and issubclass(each, torch.nn.Module)):
                found[f"{part.__name__.split('.')[1]}.{name}"] = each
    return found


LAYER = capsfast.DynamicRouting(I, J, K, D)
# Values of required arguments; other required arguments are 4. Networks are small.
GIVEN: dict[str, Any] = {
    "s": torch.randn(B, D),
    **good("u"),
    **good("route_votes"),
    "interests": torch.randn(B, J, D),
    "items": torch.randn(B, D),
    "layer": LAYER,
    "model": LAYER,
    "example": torch.randn(B, I, K),
    "name": "reference",
    "size": (2, 2),
    "routing_module": compat.AgreementRouting(4, 4, 3),
    "max_length": 4,
}
SMALL = {"conv_channels": 4, "types": 2, "image_size": 20}
TENSORS = {
    *("s", "u", "weight", "votes", "interests", "items", "logits", "mask", "out_mask", "query", "precision", "center"),
    *("prior", "activation", "lse", "example"),
}


def message_of(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """The message of the error; fails if the function accepts the argument."""
    try:
        function(**arguments)
    except (TypeError, ValueError) as error:
        return str(error)
    return "capsfast."


def test_pose_matrices_and_positions_that_do_not_fit() -> None:
    u, weight = torch.randn(2, 3, 4, 5), torch.randn(3, 6, 5, 7)
    assert capsfast.routing_pass(u, weight, query=torch.zeros(2, 6, 28)).first.shape == (2, 6, 28)
    votes = torch.randn(2, 3, 4, 5, 6, 7)
    mask = torch.ones(2, 3, dtype=torch.bool)
    assert capsfast.route_votes(votes, mask=mask).shape == (2, 4, 5, 6, 7)
    wrong: dict[str, Callable[[], Any]] = {
        r"weight must be \[I, J, Q, R\] with Q=5, .* got 7": lambda: capsfast.routing_pass(u, weight.transpose(2, 3)),
        r"query must be \[B, J, D\] = \[2, 6, 28\], got \[2, 6, 7\]": lambda: capsfast.routing_pass(
            u, weight, query=torch.zeros(2, 6, 7)
        ),
        r"must not be empty, got u \[2, 3, 0, 5\]": lambda: capsfast.dynamic_routing(u[:, :, :0], weight),
        r"mask must have shape \[B, I, 6, 7\], got \[2, 3, 42\]": lambda: capsfast.route_votes(
            votes, mask=mask[:, :, None].expand(-1, -1, 42)
        ),
        r"query must be .* positions \[6, 7\], got \[2, 4, 5, 7, 6\]": lambda: capsfast.votes_pass(
            votes, query=torch.zeros(2, 4, 5, 7, 6)
        ),
    }
    for message, function in wrong.items():
        with pytest.raises(ValueError, match=message):
            function()


@pytest.mark.parametrize("name", public())
def test_a_tensor_in_the_place_of_anything_else_is_not_printed(name: str) -> None:
    function = public()[name]
    parameters = [each for each in inspect.signature(function).parameters.values() if "VAR" not in each.kind.name]
    given = {
        each.name: GIVEN.get(each.name, 4)
        for each in parameters
        if each.default is each.empty or each.name in ("max_length", "bias")
    }
    if name.startswith("models."):
        given |= {each.name: SMALL[each.name] for each in parameters if each.name in SMALL}
    for each in parameters:
        # torch itself reports a wrong device or dtype.
        if each.name in {*TENSORS, "device", "dtype"} or (each.name == "bias" and each.default is None):
            continue
        for tensor in (torch.full((3, 4), 0.12345), torch.full((1,), -0.12345)):
            message = message_of(function, given | {each.name: tensor})
            assert message.startswith("capsfast.") and len(message) < 1000, message
            assert "tensor(" not in message and "0.123" not in message, message
