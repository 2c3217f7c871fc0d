"""The layers of the stacked capsule autoencoder: parts, templates, a set transformer, objects."""

from .object_caps import ObjectCaps, Objects, explain
from .part_caps import PartCaps, Parts, TemplateMixture
from .set_transformer import SetTransformer

__all__ = ["ObjectCaps", "Objects", "PartCaps", "Parts", "SetTransformer", "TemplateMixture", "explain"]
