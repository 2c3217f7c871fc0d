"""A network, its loss and its optimizer as a Lightning module."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from ..data import Batch
from ..data.seeds import seed_for
from ..nn import CapsNetLoss, LossParts, MarginLoss
from .networks import build


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """``labels [B]`` or ``[B, n]`` to float32 ``[B, J]``, 1 for each class that is there."""
    there = torch.zeros(len(labels), num_classes, device=labels.device)
    return there.scatter_(1, labels.view(len(labels), -1), 1.0)


def right_predictions(lengths: Tensor, labels: Tensor) -> Tensor:
    """Whether the longest of ``lengths [B, J]`` are those of ``labels`` (``[B]`` or ``[B, n]``), bool ``[B]``."""
    wanted = labels.view(len(labels), -1)
    found = lengths.topk(wanted.shape[1], dim=1).indices
    return (found.sort(1).values == wanted.sort(1).values).all(1)


class Decay:
    """The factor on the learning rate at a step: linear warm-up, then ``rate ** (step / steps)``."""

    def __init__(self, warmup_steps: int, rate: float, steps: int) -> None:
        self.warmup_steps = warmup_steps
        self.rate = rate
        self.steps = steps

    def __call__(self, step: int) -> float:
        warm = min(1.0, (step + 1) / (self.warmup_steps + 1))
        return warm * float(self.rate ** (step / self.steps))


class Learner(pl.LightningModule):
    """Margin loss and reconstruction by Adam (Sabour, Frosst, Hinton 2017, section 4).

    Overlapping images have two labels: the margin loss wants both capsules, and each is decoded into the
    image of its own object (section 6 there). An auto-encoder has the reconstruction alone.

    Every step seeds torch anew from seed, step and rank, so that a resumed run draws what an uninterrupted one would.

    Args:
        model: a name of :data:`capsfast.train.NETWORKS`.
        in_channels, image_size, num_classes: of the data set.
        options: of the model, by its own names.
        lr: learning rate after the warm-up.
        warmup_steps: steps over which it grows, linearly.
        decay_rate, decay_steps: it is multiplied by ``decay_rate`` every ``decay_steps``, smoothly.
        clip: largest norm of all gradients together; None leaves them.
        reconstruction_weight: times the summed squared error.
        seed: of the first weights, and of what a model draws while it trains.

    Raises:
        ValueError, TypeError: no such model, an option it does not take, or numbers out of range.
    """

    def __init__(
        self,
        model: str = "capsnet",
        in_channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        *,
        options: dict[str, Any] | None = None,
        lr: float = 1e-3,
        warmup_steps: int = 0,
        decay_rate: float = 0.96,
        decay_steps: int = 2000,
        clip: float | None = None,
        reconstruction_weight: float = 0.0005,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        positive = {"lr": lr, "decay_rate": decay_rate, "decay_steps": decay_steps, "clip": clip}
        for name, value in positive.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"capsfast.train.Learner: {name} must be positive and finite, got {value}")
        if warmup_steps < 0:
            raise ValueError(f"capsfast.train.Learner: warmup_steps must not be negative, got {warmup_steps}")
        self.sizes = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
        self.seed = seed
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model: Any = build(model, self.sizes, options or {})
        self.lr = lr
        self.clip = clip
        self.decay = Decay(warmup_steps, decay_rate, decay_steps)
        self.loss = CapsNetLoss(reconstruction_weight)
        self.tested_at: int | None = None
        self.has_classes = model not in ("autoencoder", "segcaps")

    @property
    def has_decoder(self) -> bool:
        return self.model.decoder is not None

    def check_decoder(self, name: str) -> None:
        """Raises ValueError in the name of a function that needs class capsules with a decoder."""
        if not (self.has_classes and self.has_decoder):
            why = "was trained without reconstruction" if self.has_classes else "has no classes"
            raise ValueError(f"capsfast.train.{name}: class capsules with a decoder are needed; this network {why}")

    def losses(self, batch: Batch) -> tuple[LossParts, Tensor]:
        """The parts of the loss, means over the batch, and the capsules' lengths ``[B, J]``."""
        images, labels, parts = batch
        if not self.has_classes:
            output = self.model(images)
            error = self.loss.reconstruction(output.reconstruction, images)
            return LossParts(error, torch.zeros_like(error), error), output.lengths
        if parts is None:
            output = self.model(images, labels)
            return self.loss(output, images, labels), output.lengths
        output = self.model(images, labels[:, 0])
        targets = multi_hot(labels, output.lengths.shape[1])
        found = self.loss(output, parts[:, 0], targets)
        if self.has_decoder:
            second = self.loss.reconstruction(self.model.reconstruct(output.capsules, labels[:, 1]), parts[:, 1])
            total = found.total + self.loss.reconstruction_weight * second
            found = LossParts(total, found.margin, found.reconstruction + second)
        return found, output.lengths

    def margin_of(self, labels: Tensor) -> Callable[[Tensor], Tensor]:
        """The margin loss as a function of images, summed over them: what an attack raises."""
        loss = MarginLoss(reduction="sum")
        targets = multi_hot(labels, self.sizes["num_classes"])
        return lambda images: loss(self.model.classify(images).activations, targets)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(seed_for(self.seed, "step", self.global_step, self.global_rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found, _ = self.losses(batch)
        shown = {"loss": found.total, "reconstruction": found.reconstruction}
        if self.has_classes:
            shown["margin"] = found.margin
        self.log_dict(shown, prog_bar=True)
        self.log("lr", self.lr * self.decay(self.global_step))
        return found.total

    def on_validation_epoch_start(self) -> None:
        # Sums over this process's images of margin, reconstruction, right answers; then their number.
        self._sums = torch.zeros(4, device=self.device)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        found, lengths = self.losses(batch)
        n = len(batch.labels)
        right = right_predictions(lengths, batch.labels).sum() if self.has_classes else found.margin
        self._sums += torch.stack([n * found.margin, n * found.reconstruction, right, torch.full_like(found.margin, n)])

    def on_validation_epoch_end(self) -> None:
        sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum")
        self.tested_at = self.global_step
        margin, reconstruction, right, count = sums.tolist()
        found = {"test_reconstruction": reconstruction / count}
        if self.has_classes:
            found |= {"test_margin": margin / count, "test_accuracy": right / count}
        # The same on all processes already; Lightning wants to be told.
        self.log_dict(found, prog_bar=True, sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        # Here and not in the trainer: it is kept in the checkpoint.
        if self.clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
