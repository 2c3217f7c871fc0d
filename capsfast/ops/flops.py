"""Formulas for torch.utils.flop_counter, which otherwise counts 0 for the ops.

A formula counts what the definition of the op computes with stored votes, as torch counts it: two FLOPs for each
multiply-add of a contraction, none for a softmax, a squash or other functions of single numbers. Votes that a kernel
computes again do not count again, so the count does not depend on the kernels. Masks do not change it.

torch.utils.flop_counter imports triton, so it is not imported here: the formulas follow when the user imports it.
"""

import importlib.abc
import importlib.machinery
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ..environment.private_torch import OpOverload

# Takes the arguments of an op, or of its backward, by name; returns an int, or a SymInt while a program is compiled.
Formula = Callable[[Any], Any]
COUNTER = "torch.utils.flop_counter"
_formulas: list[tuple[OpOverload, Callable[..., Any]]] = []


def announce(op: OpOverload, arguments: Sequence[str], formula: Formula) -> None:
    """Adds a formula to those that torch.utils.flop_counter gets when it is imported, or at once if it already is."""

    def counted(*given: Any, out_val: Any = None, _node_meta: Any = None, **named: Any) -> Any:
        return formula(SimpleNamespace(**dict(zip(arguments, given, strict=False)), **named))

    _formulas.append((op, counted))
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register(counter: ModuleType) -> None:
    while _formulas:
        op, formula = _formulas.pop()
        counter.register_flop_formula(op._overloadpacket, get_raw=True)(formula)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find torch.utils.flop_counter, and registers the formulas after the module's import."""

    searching = False  # True while the other finders search: the _Finder of another build would ask this one

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != COUNTER or self.searching:
            return None
        self.searching = True
        try:
            specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
            spec = next((flops for flops in specs if flops is not None), None)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def then_register(module: ModuleType) -> None:
            execute(module)
            _register(module)
            sys.meta_path.remove(self)

        spec.loader.exec_module = then_register  # type: ignore[method-assign]
        return spec


def of_votes(a: Any, sizes: tuple[int, int, int, int], S: Sequence[int]) -> tuple[int, int]:
    """The FLOPs that make the votes from u and the weight, and the FLOPs of a sum of all votes times numbers."""
    once = 2 * math.prod(sizes) * math.prod(S)
    return (0 if a.weight is None else once * a.weight.shape[3]), once


def of_steps(a: Any, needs_logits: bool) -> tuple[int, int, int]:
    """(weighted sums, coupling coefficients, agreements): how many iterations of each a backward differentiates.

    The coupling coefficients of the first iteration depend only on the caller's logits.
    """
    steps = 1 if a.gradient == "last" else a.num_iterations
    sums = steps if a.dv is not None else steps - 1
    return sums, max(sums - 1, 0) + (needs_logits and sums > 0), steps - 1
