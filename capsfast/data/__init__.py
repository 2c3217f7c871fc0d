"""Images with labels: known data sets by name, pictures, arrays and data sets of your own, and what is made of them."""

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
