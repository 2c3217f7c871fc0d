"""What the ops take and return, read from schemas.inc: the one text that the extension reads too.

A schema lists the tensors first: u and weight, what goes with the capsules, the masks. Then come the options, and last
bools ``return_...`` that ask for results. The schema of the backward lists the gradients of the results, the tensors,
the results that are saved, the options, and which of the gradients that it returns are ``needed``.
"""

import re
from dataclasses import dataclass, field

from ..native import SCHEMAS


def _listed(text: str) -> dict[str, str]:
    """``Tensor u, Tensor? weight`` as types by name."""
    return {name: kind for kind, name in (argument.split() for argument in text.split(", "))}


def _parsed(name: str) -> tuple[dict[str, str], tuple[str, ...]]:
    for schema in SCHEMAS:
        found = re.fullmatch(r"(\w+)\((.*)\) -> \((.*)\)", schema)
        assert found is not None, schema
        if found[1] == name:
            return _listed(found[2]), tuple(_listed(found[3]))
    raise KeyError(name)


@dataclass
class Contract:
    """An op ``capsfast::name`` and its backward, by the names of what they take and return.

    Attributes:
        arguments, backward: what the op takes, and what its backward takes.
        tensors: how many of the arguments are tensors or None; they come first.
        requests: how many bools ``return_...`` end the arguments.
        outputs: the results, of which the first ``differentiable`` have gradients.
        saved: the last results, for the backward.
        needed: what may need a gradient, the first of the tensors.
    """

    name: str
    arguments: tuple[str, ...] = field(init=False)
    backward: tuple[str, ...] = field(init=False)
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
        self.tensors = sum(kind.startswith("Tensor") for kind in taken.values())
        self.requests = sum(name.startswith("return_") for name in taken)
        self.differentiable = self.backward.index(self.arguments[0])
        first_option = self.backward.index(self.arguments[self.tensors])
        self.saved = self.backward[self.differentiable + self.tensors : first_option]
        assert self.saved == self.outputs[len(self.outputs) - len(self.saved) :], "a backward gets the last results"
        self.needed = tuple(name.removeprefix("d") for name in gradients)
