"""Whole networks of capsules. Each returns a :class:`CapsNetOutput`."""

from .autoencoder import CapsAutoEncoder
from .capsnet import CapsNet
from .deepcaps import DeepCaps
from .matrix_capsnet import MatrixCapsNet
from .output import CapsNetOutput

__all__ = ["CapsAutoEncoder", "CapsNet", "CapsNetOutput", "DeepCaps", "MatrixCapsNet"]
