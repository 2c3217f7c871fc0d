"""Whole networks of capsules. Each returns a :class:`CapsNetOutput`."""

from .autoencoder import CapsAutoEncoder
from .capsnet import CapsNet
from .deepcaps import DeepCaps
from .efficient_capsnet import EfficientCapsNet
from .inverted_attention import InvertedAttentionCapsNet
from .output import CapsNetOutput

__all__ = ["CapsAutoEncoder", "CapsNet", "CapsNetOutput", "DeepCaps", "EfficientCapsNet", "InvertedAttentionCapsNet"]
