"""Whole networks of capsules. Each returns a :class:`CapsNetOutput`."""

from .autoencoder import CapsAutoEncoder
from .capsnet import CapsNet
from .cnn import CNN
from .deepcaps import DeepCaps
from .output import CapsNetOutput
from .stacked_autoencoder import Sparsity, StackedCapsuleAutoencoder

__all__ = [
    "CNN",
    "CapsAutoEncoder",
    "CapsNet",
    "CapsNetOutput",
    "DeepCaps",
    "Sparsity",
    "StackedCapsuleAutoencoder",
]
