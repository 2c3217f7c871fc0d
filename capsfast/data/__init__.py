"""Data sets of labelled images: handwritten digits, IDX files, overlapping and warped ones made from them."""

from .affine import RandomAffine
from .augment import CentreCrop, Chain, Cutout, RandomCrop, RandomFlip, RandomLight, channel_statistics
from .batches import BatchOrder, Draw, ResumableLoader
from .catalogue import Sets, load, open_sets
from .cifar import read_cifar_binary, read_cifar_pickle
from .idx import read_idx
from .labelled import Labelled, Split
from .norb import read_norb
from .sets import Batch, ImageSet, OverlappingSet

__all__ = [
    "Batch",
    "BatchOrder",
    "CentreCrop",
    "Chain",
    "Cutout",
    "Draw",
    "ImageSet",
    "Labelled",
    "OverlappingSet",
    "RandomAffine",
    "RandomCrop",
    "RandomFlip",
    "RandomLight",
    "ResumableLoader",
    "Sets",
    "Split",
    "channel_statistics",
    "load",
    "open_sets",
    "read_cifar_binary",
    "read_cifar_pickle",
    "read_idx",
    "read_norb",
]
