"""The command ``clusters``: classes that were found without labels."""

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from ..files import check_replaceable, write_text
from .common import Accelerator, Checkpoint, Data, DataDir, opened, plain_errors, say, to_accelerator
from .endings import stop


def clusters(
    checkpoint: Checkpoint,
    data: Data = None,
    data_dir: DataDir = None,
    images: Annotated[int, typer.Option(min=1, help="Find clusters among so many images to train on.")] = 10_000,
    json: Annotated[Path | None, typer.Option(help="Write the numbers there.")] = None,
    accelerator: Accelerator = "auto",
) -> None:
    """Accuracy of clusters of object presences on the test images, for a network of ``train --model stacked``.

    Labels do no more than name the clusters.
    """
    with plain_errors("clusters"):
        if json is not None:
            check_replaceable(json)
        from .. import train
        from ..data import ImageSet

        learner, sets = opened(checkpoint, data, data_dir)
        if not isinstance(learner, train.StackedLearner):
            raise stop(f"capsfast clusters: a network of --model stacked is needed, got {learner.hparams['model']}")
        if not isinstance(sets.test, ImageSet):
            raise stop("capsfast clusters: images of one class each are needed, these overlap")
        to_accelerator(learner, accelerator)
        # As the test images are: what training does to images at random would blur the clusters.
        still = ImageSet(sets.train.source, sets.test.transform)
        found, _ = train.object_presences(learner, still, limit=images)
        presences, labels = train.object_presences(learner, sets.test)
        accuracy = train.cluster_accuracy(found, presences, labels, sets.num_classes)
        say(f"{accuracy:.2%} of {len(labels)} right, by {sets.num_classes} clusters of {len(found)} images")
        if json is not None:
            content = {"images": len(labels), "accuracy": accuracy, "clustered": len(found)}
            write_text(json, json_format.dumps(content, indent=1) + "\n")
            say(f"wrote {json}")
