"""Recognises routing layers of other code and replaces them by capsfast."""

from .entry import identify
from .identification import Identification, Sizes
from .refusal import NotReproduced
from .replacement import accelerate
from .report import Acceleration, LayerReport, undo

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
