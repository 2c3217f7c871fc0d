"""Whole networks of capsules.

They return a :class:`CapsNetOutput`, except SegCaps (:class:`SegCapsOutput`) and StackedCapsuleAutoencoder
(:class:`StackedOutput`).
"""

from .autoencoder import CapsAutoEncoder
from .capsnet import CapsNet
from .cnn import CNN
from .deepcaps import DeepCaps
from .efficient_capsnet import EfficientCapsNet
from .inverted_attention import InvertedAttentionCapsNet
from .matrix_capsnet import MatrixCapsNet
from .output import CapsNetOutput
from .segcaps import SegCaps, SegCapsOutput
from .stacked_autoencoder import Sparsity, StackedCapsuleAutoencoder

__all__ = [
    "CNN",
    "CapsAutoEncoder",
    "CapsNet",
    "CapsNetOutput",
    "DeepCaps",
    "EfficientCapsNet",
    "InvertedAttentionCapsNet",
    "MatrixCapsNet",
    "SegCaps",
    "SegCapsOutput",
    "Sparsity",
    "StackedCapsuleAutoencoder",
]
