"""The arguments and results of the ops, read from schemas.inc. The extension reads the same file.

A schema lists the tensors first: u and weight, the parameters of the capsules, the masks. Then come the options, and
last the bools ``return_...`` that request results. The schema of the backward lists the gradients of the results, the
tensors, the saved results, the options, and ``needed``, which says which gradients to return.
"""

import re
from dataclasses import dataclass, field

from ..environment.native import SCHEMAS


def _listed(text: str) -> dict[str, str]:
    """The types by name in a list such as ``Tensor u, Tensor? weight``."""
    return {name: kind for kind, name in (argument.split() for argument in text.split(", "))}


def _parsed(name: str) -> tuple[dict[str, str], tuple[str, ...]]:
    for schema in SCHEMAS:
        match = re.fullmatch(r"(\w+)\((.*)\) -> \((.*)\)", schema)
        assert match is not None, schema
        if match[1] == name:
            return _listed(match[2]), tuple(_listed(match[3]))
    raise KeyError(name)


@dataclass
class Contract:
    """The names of the arguments and results of an op ``capsfast::name`` and its backward.

    Attributes:
        arguments, backward: arguments of the op and of its backward.
        types, backward_types: the types of the arguments.
        tensors: number of arguments that are tensors or None; they come first.
        requests: number of bools ``return_...``, the last arguments.
        outputs: the results; the first ``differentiable`` have gradients.
        saved: the last results, which the backward needs.
        needed: the first tensors, which may need a gradient.
    """

    name: str
    arguments: tuple[str, ...] = field(init=False)
    backward: tuple[str, ...] = field(init=False)
    types: tuple[str, ...] = field(init=False)
    backward_types: tuple[str, ...] = field(init=False)
    tensors: int = field(init=False)
    requests: int = field(init=False)
    outputs: tuple[str, ...] = field(init=False)
    differentiable: int = field(init=False)
    saved: tuple[str, ...] = field(init=False)
    needed: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        taken, self.outputs = _parsed(self.name)
        taken_back, gradients = _parsed(f"{self.name}_backward")
        self.arguments, self.backward = tuple(taken), tuple(taken_back)
        self.types, self.backward_types = tuple(taken.values()), tuple(taken_back.values())
        self.tensors = sum(kind.startswith("Tensor") for kind in taken.values())
        self.requests = sum(name.startswith("return_") for name in taken)
        self.differentiable = self.backward.index(self.arguments[0])
        first_option = self.backward.index(self.arguments[self.tensors])
        self.saved = self.backward[self.differentiable + self.tensors : first_option]
        assert self.saved == self.outputs[len(self.outputs) - len(self.saved) :], "a backward gets the last results"
        self.needed = tuple(name.removeprefix("d") for name in gradients)
