"""Layers that others wrote, and what capsfast computes in their place."""

from .identification import Identification, Sizes

__all__ = ["Identification", "Sizes"]
