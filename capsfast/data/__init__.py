"""Data sets of labelled images: handwritten digits, IDX files, overlapping and warped ones made from them."""

from .affine import RandomAffine
from .batches import BatchOrder, Draw, ResumableLoader
from .catalogue import Sets, load, open_sets
from .idx import read_idx
from .labelled import Labelled, Split
from .sets import Batch, ImageSet, OverlappingSet

__all__ = [
    "Batch",
    "BatchOrder",
    "Draw",
    "ImageSet",
    "Labelled",
    "OverlappingSet",
    "RandomAffine",
    "ResumableLoader",
    "Sets",
    "Split",
    "load",
    "open_sets",
    "read_idx",
]
