"""Which learner trains which network."""

from typing import Any

from .learner import Learner
from .segmentation import SegmentationLearner
from .stacked import StackedLearner

LEARNERS: dict[str, type[Learner]] = {"segcaps": SegmentationLearner, "stacked": StackedLearner}


def make_learner(model: str = "capsnet", *sizes: int, **options: Any) -> Learner:
    """The learner of a model, with its arguments: those of :class:`Learner`."""
    return LEARNERS.get(model, Learner)(model, *sizes, **options)
