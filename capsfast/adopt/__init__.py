"""Recognises routing layers of other code and replaces them by capsfast."""

from .identification import Identification
from .orders import Sizes
from .replacement import accelerate
from .report import Acceleration, LayerReport, undo
from .search import identify
from .trial import NotReproduced

__all__ = [
    "Acceleration",
    "Identification",
    "LayerReport",
    "NotReproduced",
    "Sizes",
    "accelerate",
    "identify",
    "undo",
]
