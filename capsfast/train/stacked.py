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
    """:class:`Learner` of a :class:`capsfast.models.StackedCapsuleAutoencoder`, which sees no labels.

    The loss is that of the network, the sum of its terms. A test gives each term, and the squared error of the images
    as ``test_reconstruction``. Arguments as for Learner; those for classes raise or have no meaning here.
    """

    def measured(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        output = self.model(self.normalized(batch.images), batch.images)
        terms = self.model.loss(output)
        error = self.reconstruction_loss(output.reconstruction, batch.images)
        return {"loss": torch.stack(list(terms.values())).sum(), **terms, "reconstruction": error}, output


def clustered(learner: StackedLearner, sets: Sets, *, limit: int) -> tuple[float, int, int]:
    """Accuracy on the test images of clusters that were found among the first ``limit`` training images.

    Returns:
        The accuracy, and how many images the clusters were found among and tested on.

    Raises:
        ValueError: overlapping images, or what :func:`capsfast.train.cluster_accuracy` rejects.
    """
    if not isinstance(sets.test, ImageSet):
        raise ValueError("capsfast.train.clustered: images of one class each are needed, these overlap")
    # As the test images are: what training does to images at random would blur the clusters.
    still = ImageSet(sets.train.source, sets.test.transform)
    found, _ = object_presences(learner, still, limit=limit)
    presences, labels = object_presences(learner, sets.test)
    return cluster_accuracy(found, presences, labels, sets.num_classes), len(found), len(labels)


@torch.no_grad()
def object_presences(
    learner: StackedLearner, dataset: DrawnSet, *, limit: int | None = None, batch_size: int = 256
) -> tuple[Tensor, Tensor]:
    """Presences of the object capsules ``[N, K]`` and labels ``[N]``, over the first ``limit`` images.

    :func:`capsfast.train.cluster_accuracy` says how well the former tell the latter.
    """
    learner.eval()
    presences, labels = [], []
    for batch in batches(dataset, batch_size, limit):
        output = learner.output(batch.images.to(learner.device))
        presences.append(output.objects.presences.cpu())
        labels.append(batch.labels)
    return torch.cat(presences), torch.cat(labels)
