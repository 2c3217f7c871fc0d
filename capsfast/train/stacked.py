"""Training without labels: the stacked capsule autoencoder, and how well its clusters agree with the classes."""

from typing import Any

import torch
from torch import Tensor

from ..data import Batch, ImageSet, Sets
from ..data.sets import DrawnSet
from ..environment.install import in_the_checkout
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


def cluster_accuracy(train: Tensor, test: Tensor, labels: Tensor, num_classes: int, seed: int = 0) -> float:
    """Accuracy of k-means clusters under their best assignment to classes (LIN-MATCH, Kosiorek et al. 2019, section 3).

    k-means finds the clusters in ``train`` without labels. Then each cluster is assigned its own class, so that as many
    of ``test`` as possible are right; only this assignment uses labels.

    Args:
        train, test: features of the images, ``[N, K]`` and ``[n, K]``, such as the presences of object capsules.
        labels: labels of the test images, int64 ``[n]``.
        num_classes: number of clusters and of classes.
        seed: seed of k-means, which starts ten times.

    Returns:
        The share of test images whose cluster is assigned to their class.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
        ValueError: fewer training images than clusters.
    """
    op = "capsfast.train.cluster_accuracy"
    try:
        from scipy.optimize import linear_sum_assignment
        from sklearn.cluster import KMeans
        from sklearn.metrics import confusion_matrix
    except ImportError:
        raise ModuleNotFoundError(f"{op}: needs scikit-learn; {in_the_checkout('train')}") from None
    if len(train) < num_classes:
        raise ValueError(f"{op}: train must have at least num_classes={num_classes} rows, got {len(train)}")
    clusters = KMeans(num_classes, n_init=10, random_state=seed).fit(train.double().numpy())
    pairs = confusion_matrix(labels, clusters.predict(test.double().numpy()), labels=range(num_classes))
    return float(pairs[linear_sum_assignment(pairs, maximize=True)].sum()) / len(labels)


def clustered(learner: StackedLearner, sets: Sets, *, limit: int) -> tuple[float, int, int]:
    """Accuracy on the test images of clusters found in the first ``limit`` training images.

    Returns:
        The accuracy, the number of images used to find the clusters, and the number of test images.

    Raises:
        ValueError: overlapping images, or any error of :func:`cluster_accuracy`.
    """
    if not isinstance(sets.test, ImageSet):
        raise ValueError("capsfast.train.clustered: images of one class each are needed, these overlap")
    # With the test images' transform: random augmentation would blur the clusters.
    still = sets.test.of(sets.train.source)
    found, _ = object_presences(learner, still, limit=limit)
    presences, labels = object_presences(learner, sets.test)
    return cluster_accuracy(found, presences, labels, sets.num_classes), len(found), len(labels)


@torch.no_grad()
def object_presences(
    learner: StackedLearner, dataset: DrawnSet, *, limit: int | None = None, batch_size: int = 256
) -> tuple[Tensor, Tensor]:
    """Presences of the object capsules ``[N, K]`` and labels ``[N]``, over the first ``limit`` images."""
    learner.eval()
    presences, labels = [], []
    for batch in batches(dataset, batch_size, limit):
        output = learner.model(learner.normalized(batch.images.to(learner.device)))
        presences.append(output.objects.presences.cpu())
        labels.append(batch.labels)
    return torch.cat(presences), torch.cat(labels)
