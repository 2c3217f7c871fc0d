"""Labelled images: known data sets by name, your own pictures, arrays and data sets, and batches with augmentation."""

from .batches import BatchOrder, Draw, ResumableLoader
from .catalogue import Sets, load, open_sets
from .images import Images, Split, channel_statistics
from .sets import Batch, ImageSet, OverlappingSet
from .stored import read_idx, read_norb

__all__ = [
    "Batch",
    "BatchOrder",
    "Draw",
    "ImageSet",
    "Images",
    "OverlappingSet",
    "ResumableLoader",
    "Sets",
    "Split",
    "channel_statistics",
    "load",
    "open_sets",
    "read_idx",
    "read_norb",
]
