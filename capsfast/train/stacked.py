"""Training without labels: the stacked capsule autoencoder."""

from typing import Any

import torch
from torch import Tensor

from ..data import Batch, ImageSet, Sets
from ..data.sets import DrawnSet
from .clusters import cluster_accuracy
from .evaluate import batches
from .learner import Learner


class StackedLearner(Learner, model="stacked"):
    """:class:`Learner` for a :class:`capsfast.models.StackedCapsuleAutoencoder`, which sees no labels.

    The loss is the sum of the network's loss terms. A test logs each term, and the squared error of the images as
    ``test_reconstruction``. Arguments as for Learner; options about classes raise an error or have no effect.
    """

    def measured(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        output = self.model(self.normalized(batch.images), batch.images)
        terms = self.model.loss(output)
        error = self.reconstruction_loss(output.reconstruction, batch.images)
        return {"loss": torch.stack(list(terms.values())).sum(), **terms, "reconstruction": error}, output


def clustered(learner: StackedLearner, sets: Sets, *, limit: int) -> tuple[float, int, int]:
    """Accuracy on the test images of clusters found in the first ``limit`` training images.

    Returns:
        The accuracy, the number of images used to find the clusters, and the number of test images.

    Raises:
        ValueError: overlapping images, or any error of :func:`capsfast.train.cluster_accuracy`.
    """
    if not isinstance(sets.test, ImageSet):
        raise ValueError("capsfast.train.clustered: images of one class each are needed, these overlap")
    # With the test images' transform: random augmentation would blur the clusters.
    still = ImageSet(sets.train.source, sets.test.transform)
    found, _ = object_presences(learner, still, limit=limit)
    presences, labels = object_presences(learner, sets.test)
    return cluster_accuracy(found, presences, labels, sets.num_classes), len(found), len(labels)


@torch.no_grad()
def object_presences(
    learner: StackedLearner, dataset: DrawnSet, *, limit: int | None = None, batch_size: int = 256
) -> tuple[Tensor, Tensor]:
    """Presences of the object capsules ``[N, K]`` and labels ``[N]``, over the first ``limit`` images.

    :func:`capsfast.train.cluster_accuracy` measures how well presences tell the classes apart.
    """
    learner.eval()
    presences, labels = [], []
    for batch in batches(dataset, batch_size, limit):
        output = learner.output(batch.images.to(learner.device))
        presences.append(output.objects.presences.cpu())
        labels.append(batch.labels)
    return torch.cat(presences), torch.cat(labels)
