"""Layers that others wrote, and what capsfast computes in their place."""

from .entry import identify
from .identification import Identification, Sizes
from .refusal import NotReproduced

__all__ = ["Identification", "NotReproduced", "Sizes", "identify"]
