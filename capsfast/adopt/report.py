"""The report of capsfast.accelerate, and how to undo it."""

from dataclasses import dataclass, field

from torch import nn

from .beside import Speed
from .fused import Calls, FusedLayer, is_fused, restore
from .identification import Identification
from .state import COUNT

FUSED, TO_BE_FUSED, ALREADY, LEFT_ALONE = "fused", "to be fused", "already fused", "left alone"
HEADER = ("layer", "class", "", "forward+backward", "difference")


@dataclass(frozen=True)
class LayerReport:
    """The report of one layer.

    Attributes:
        name: name of the layer in the model, empty for the model itself.
        kind: name of its class.
        status: ``"fused"``, ``"to be fused"`` in a dry run, ``"already fused"`` or ``"left alone"``.
        reason: why it was left alone, or further remarks.
        identification: what the layer computes, if that was found.
        difference: largest relative difference of the results in the dtype of the example.
        speed: seconds of forward plus backward, if measured.
    """

    name: str
    kind: str
    status: str
    reason: str = ""
    identification: Identification | None = None
    difference: float | None = None
    speed: Speed | None = None

    @property
    def words(self) -> str:
        """What the layer computes, and the remarks, one per line."""
        lines = () if self.identification is None else self.identification.summary()
        return "\n".join([*lines, *([self.reason] if self.reason else [])])

    def cells(self) -> tuple[str, ...]:
        difference = "" if self.difference is None else f"{self.difference:.0e}"
        return (self.name or "(the model)", self.kind, self.status, str(self.speed or ""), difference)


@dataclass(frozen=True)
class Acceleration:
    """The report of :func:`capsfast.accelerate`; ``print`` it.

    Attributes:
        layers: a report for each layer that looked like routing.
    """

    layers: tuple[LayerReport, ...]
    _fused: tuple[nn.Module, ...] = field(default=(), repr=False, compare=False)

    @property
    def fused(self) -> tuple[str, ...]:
        """Names of the layers that this call fused, or would fuse if it is a dry run."""
        return tuple(layer.name for layer in self.layers if layer.status in (FUSED, TO_BE_FUSED))

    @property
    def left_alone(self) -> dict[str, str]:
        """Names of the layers that were left alone, with the reasons."""
        return {layer.name: layer.reason for layer in self.layers if layer.status == LEFT_ALONE}

    def __getitem__(self, name: str) -> LayerReport:
        """The report of the layer with this name.

        Raises:
            KeyError: no such layer looked like routing.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(f"no layer {name!r} in the report, which has {[layer.name for layer in self.layers]}")

    def __str__(self) -> str:
        if not self.layers:
            return (
                "The example called no layer that takes and gives capsules or votes as routing does. Give routing that "
                "is part of a larger forward a module of its own; scripted modules are not looked at."
            )
        rows = [HEADER, *(layer.cells() for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        for layer in self.layers:
            if layer.words:
                lines += ["", f"{layer.cells()[0]}:", *(f"  {line}" for line in layer.words.splitlines())]
        return "\n".join(lines)

    def calls(self) -> dict[str, Calls]:
        """For each layer that this call fused: how often it ran fused and its own forward, and the last reason."""
        names = [layer.name for layer in self.layers if layer.status == FUSED]
        return {name: vars(layer).get(COUNT, Calls()) for name, layer in zip(names, self._fused, strict=True)}

    def undo(self) -> None:
        """Restores the own forward of the layers that this call fused, unless they were undone already.

        Raises:
            RuntimeError: the class of a fused layer was replaced since; no layer is undone.
        """
        restore_all([layer for layer in self._fused if isinstance(layer, FusedLayer)])


def restore_all(layers: list[nn.Module]) -> None:
    # Layers that can't be restored go first, so that the error comes before any change.
    for layer in sorted(layers, key=is_fused):
        restore(layer)


def undo(model: nn.Module) -> tuple[str, ...]:
    """Restores the own forward of every layer of the model that :func:`capsfast.accelerate` fused.

    Returns:
        The names of these layers.

    Raises:
        RuntimeError: the class of a fused layer was replaced since, as by a parametrization; no layer is undone.
    """
    names = tuple(name for name, module in model.named_modules() if isinstance(module, FusedLayer))
    restore_all([model.get_submodule(name) for name in names])
    return names
