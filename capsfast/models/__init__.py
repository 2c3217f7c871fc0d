"""Whole networks of capsules. Each returns a :class:`CapsNetOutput`, SegCaps a :class:`SegCapsOutput`."""

from .autoencoder import CapsAutoEncoder
from .capsnet import CapsNet
from .deepcaps import DeepCaps
from .output import CapsNetOutput
from .segcaps import SegCaps, SegCapsOutput

__all__ = ["CapsAutoEncoder", "CapsNet", "CapsNetOutput", "DeepCaps", "SegCaps", "SegCapsOutput"]
