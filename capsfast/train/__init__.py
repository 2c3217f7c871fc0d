"""Training and inspection of capsule networks with Lightning. Needs the extra ``train``."""

from importlib.util import find_spec

from ..environment.install import in_the_checkout

if find_spec("lightning") is None:
    raise ModuleNotFoundError(f"capsfast.train needs lightning; {in_the_checkout('train')}")

from .attacks import fgsm, lead, pgd
from .checkpoint import open_checkpoint, open_pretrained
from .evaluate import (
    Attack,
    Evaluation,
    Predictions,
    RoutingStatistics,
    classified,
    evaluate,
    metrics,
    one_of_each_class,
    perturbations,
    predictions,
    read_picture,
    reconstructions,
    routing_statistics,
)
from .images import ImageData
from .learner import Learner
from .networks import NETWORKS, build
from .run import fit, make_trainer
from .segmentation import SegmentationLearner, pixel_classes, segmented
from .stacked import StackedLearner, cluster_accuracy, clustered, object_presences
from .stopping import Interrupted

__all__ = [
    "NETWORKS",
    "Attack",
    "Evaluation",
    "ImageData",
    "Interrupted",
    "Learner",
    "Predictions",
    "RoutingStatistics",
    "SegmentationLearner",
    "StackedLearner",
    "build",
    "classified",
    "cluster_accuracy",
    "clustered",
    "evaluate",
    "fgsm",
    "fit",
    "lead",
    "make_trainer",
    "metrics",
    "object_presences",
    "one_of_each_class",
    "open_checkpoint",
    "open_pretrained",
    "perturbations",
    "pgd",
    "pixel_classes",
    "predictions",
    "read_picture",
    "reconstructions",
    "routing_statistics",
    "segmented",
]
