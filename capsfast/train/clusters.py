"""Measures how well clusters that were found without labels agree with the classes."""

import torch
from torch import Tensor

from .._install import in_the_checkout


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
    try:
        from scipy.optimize import linear_sum_assignment
        from sklearn.cluster import KMeans
    except ImportError:
        raise ModuleNotFoundError(
            f"capsfast.train.cluster_accuracy: needs scikit-learn; {in_the_checkout('train')}"
        ) from None
    if len(train) < num_classes:
        op = "capsfast.train.cluster_accuracy"
        raise ValueError(f"{op}: train must have at least num_classes={num_classes} rows, got {len(train)}")
    clusters = KMeans(num_classes, n_init=10, random_state=seed).fit(train.double().numpy())
    found = torch.from_numpy(clusters.predict(test.double().numpy())).long()
    pairs = torch.bincount(found * num_classes + labels, minlength=num_classes**2).view(num_classes, num_classes)
    rows, columns = linear_sum_assignment(pairs.numpy(), maximize=True)
    return float(pairs[rows, columns].sum()) / len(labels)
