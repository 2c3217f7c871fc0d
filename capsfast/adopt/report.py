"""What became of each layer of a model."""

from dataclasses import dataclass, field

from torch import nn

from .fused import Calls, FusedLayer, is_fused, restore
from .identification import Identification
from .state import COUNT
from .timing import Speed

FUSED, TO_BE_FUSED, ALREADY, LEFT_ALONE = "fused", "to be fused", "already fused", "left alone"
HEADER = ("layer", "class", "", "forward", "forward+backward", "difference")


@dataclass(frozen=True)
class LayerReport:
    """What became of one layer.

    Attributes:
        name: in the model, empty for the model itself.
        kind: its class.
        status: ``"fused"``, ``"to be fused"`` in a dry run, ``"already fused"`` or ``"left alone"``.
        reason: why it was left alone, or what else there is to say.
        identification: what it computes, as far as that was found.
        difference: the largest relative one between its own forward and capsfast's, in values and gradients.
        forward, both: seconds of a forward, and of forward and backward, where they were measured.
    """

    name: str
    kind: str
    status: str
    reason: str = ""
    identification: Identification | None = None
    difference: float | None = None
    forward: Speed | None = None
    both: Speed | None = None

    @property
    def words(self) -> str:
        """What it computes and what there is to say, a line each."""
        lines = (
            [] if self.identification is None else self.identification.describe().split("\nThe call:")[0].split("\n")
        )
        lines = [line for line in lines if "largest relative difference" not in line]
        return "\n".join([*lines, *([self.reason] if self.reason else [])])

    def cells(self) -> tuple[str, ...]:
        speeds = (str(speed or "") for speed in (self.forward, self.both))
        found = "" if self.difference is None else f"{self.difference:.0e}"
        return (self.name or "(the model)", self.kind, self.status, *speeds, found)


@dataclass(frozen=True)
class Acceleration:
    """What :func:`capsfast.accelerate` did; ``print`` it.

    Attributes:
        layers: one report for each layer that looked like routing.
    """

    layers: tuple[LayerReport, ...]
    _fused: tuple[nn.Module, ...] = field(default=(), repr=False, compare=False)

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the layers that this call fused, in a dry run of those it would."""
        return tuple(each.name for each in self.layers if each.status in (FUSED, TO_BE_FUSED))

    @property
    def left_alone(self) -> dict[str, str]:
        """Names of the others, and the reasons."""
        return {each.name: each.reason for each in self.layers if each.status == LEFT_ALONE}

    def __getitem__(self, name: str) -> LayerReport:
        """The report of the layer of this name.

        Raises:
            KeyError: no such layer looked like routing.
        """
        for each in self.layers:
            if each.name == name:
                return each
        raise KeyError(f"no layer {name!r} in the report, which has {[each.name for each in self.layers]}")

    def __str__(self) -> str:
        if not self.layers:
            return "No layer of the model takes and gives capsules or votes as routing does."
        rows = [HEADER, *(each.cells() for each in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for each in self.layers:
            if each.words:
                lines += ["", f"{each.cells()[0]}:", *(f"  {line}" for line in each.words.splitlines())]
        return "\n".join(lines)

    def calls(self) -> dict[str, Calls]:
        """How often each layer that this call fused ran fused, how often its own forward, and why the last time."""
        names = [each.name for each in self.layers if each.status == FUSED]
        return {name: vars(layer).get(COUNT, Calls()) for name, layer in zip(names, self._fused, strict=True)}

    def undo(self) -> None:
        """Gives the layers that this call fused their own forward back, but for those undone since.

        Raises:
            RuntimeError: something was put in front of the class of one of them; none is undone.
        """
        restore_all([layer for layer in self._fused if isinstance(layer, FusedLayer)])


def restore_all(layers: list[nn.Module]) -> None:
    # Those that cannot be restored go first: they raise before anything is changed.
    for layer in sorted(layers, key=is_fused):
        restore(layer)


def undo(model: nn.Module) -> tuple[str, ...]:
    """Gives every layer that :func:`capsfast.accelerate` fused in the model its own forward back.

    Returns:
        Their names.

    Raises:
        RuntimeError: something was put in front of the class of one of them, such as a parametrization; none is undone.
    """
    names = tuple(name for name, module in model.named_modules() if isinstance(module, FusedLayer))
    restore_all([model.get_submodule(name) for name in names])
    return names
