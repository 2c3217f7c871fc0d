"""A network, its loss and its optimizer as a Lightning module."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from .. import checks
from .._imported import path_of
from ..data import Batch, channel_statistics
from ..data.seeds import generator, seed_for
from ..models._network import Network
from ..nn import CouplingEntropy, LossParts, ReconstructionLoss, RoutedCaps, _arguments, recorded
from ..nn.routing.base import Capsules
from .adversary import Adversary
from .dropout import drop_capsules, drop_hidden
from .images import ImageData
from .networks import OWN_LOSS, WITHOUT_CLASSES, build, plain_options
from .normalize import Normalize
from .objective import ClassLoss, multi_hot
from .schedule import Cosine, Decay

SCHEDULES = ("exponential", "cosine")
DECAY_STEPS = 2000


def right_predictions(lengths: Tensor, labels: Tensor) -> Tensor:
    """Whether the longest of ``lengths [B, J]`` are those of ``labels`` (``[B]`` or ``[B, n]``), bool ``[B]``."""
    wanted = labels.view(len(labels), -1)
    found = lengths.topk(wanted.shape[1], dim=1).indices
    return (found.sort(1).values == wanted.sort(1).values).all(1)


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    """Buffers, such as the statistics of a batch normalisation, are afterwards as they were before."""
    before = [(each, each.clone()) for each in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for each, value in before:
                each.copy_(value)


class _OfItsModel(pl.LightningModule):
    """Makes the object of the class that its model asks for."""

    _classes: ClassVar[dict[str, type["Learner"]]] = {}

    def __init_subclass__(cls, model: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if model is not None:
            _OfItsModel._classes[model] = cls  # type: ignore[assignment]

    def __new__(cls, model: str = "capsnet", *_: Any, **__: Any) -> "_OfItsModel":
        # Copies and unpickled learners, which name no model, have their class already.
        return super().__new__(cls._classes.get(model, cls) if cls is Learner else cls)


class Learner(_OfItsModel):
    """A capsule network in training: margin loss and reconstruction by Adam (Sabour, Frosst, Hinton 2017, section 4).

    Overlapping images have two labels: the margin loss wants both capsules, and each is decoded into the
    image of its own object (section 6 there). An auto-encoder has the reconstruction alone.

    Every step seeds torch anew from seed, step and rank, so that a resumed run draws what an uninterrupted one would.
    The class of the object follows from the model: segcaps makes a :class:`SegmentationLearner`, stacked a
    :class:`StackedLearner`.

    Args:
        model: capsnet, deepcaps, efficientcapsnet, invertedattention, matrixcapsnet, segcaps, autoencoder, stacked or
            cnn, or the class path of a network of your own, whose forward gives class capsules or activations.
        in_channels: of the images.
        image_size: of the images, which are square.
        num_classes: of the images.
        class_names: of the images; default: numbers.
        options: of the model, by its own names, such as conv_channels or routing. A routing of your own is given by
            class path, such as my_module.MyRouting.
        lr: learning rate after the warm-up.
        weight_decay: AdamW takes the place of Adam: every parameter also shrinks by this times the learning rate in a
            step (Loshchilov, Hutter 2019).
        schedule: how the learning rate falls: exponential or cosine.
        warmup_steps: steps over which the learning rate grows, linearly.
        decay_rate: the exponential schedule multiplies the learning rate by this every decay_steps, smoothly.
        decay_steps: see decay_rate; a cosine falls to 0 over so many steps. Default: 2000, for a cosine all steps of
            the training that begins.
        clip: largest norm of all gradients together; default: none.
        loss: of the classes: margin, mse, spread, cross-entropy, or a class path, see
            :class:`capsfast.train.objective.ClassLoss`. Default: margin, for cnn cross-entropy. A network without
            classes has a loss of its own.
        spread_steps: over which the margin of the spread loss grows.
        reconstruction_weight: times the summed squared error of an image.
        entropy_weight: times the mean entropy of the coupling in the last pass of the routing to the classes, 1 being
            equal coupling (:class:`capsfast.nn.CouplingEntropy`); in training alone.
        caps_dropout: share of the primary capsules that a step leaves out.
        decoder_dropout: share of the decoder's hidden units that a step leaves out; of a ConvDecoder, whole maps.
        normalize: what the network sees: image (mean 0, deviation 1 for each image), set (the same for the channels of
            the images to train on), or from Python the two lists of means and deviations. Default: images in [0, 1].
            Losses, attacks and reconstructions are of the images.
        adversarial: train on attacked images, made by fgsm or pgd; see :class:`capsfast.train.adversary.Adversary`. The
            decoder is to make the images as they were.
        adversarial_eps: largest change of a pixel.
        adversarial_steps: of pgd.
        adversarial_share: of the images of a step.
        seed: of the first weights, and of what a model draws while it trains.

    Raises:
        ValueError, TypeError: no such model, an option it does not take, numbers out of range, or what the network
            does not have.
    """

    # What the best checkpoint is the best by.
    monitor = ("test_accuracy", "max")

    def __init__(
        self,
        model: str = "capsnet",
        in_channels: int = 1,
        image_size: int = 28,
        num_classes: int = 10,
        *,
        class_names: list[str] | None = None,
        options: dict[str, Any] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        schedule: str = "exponential",
        warmup_steps: int = 0,
        decay_rate: float = 0.96,
        decay_steps: int | None = None,
        clip: float | None = None,
        loss: str | Callable[..., Tensor] | None = None,
        spread_steps: int = 10_000,
        reconstruction_weight: float = 0.0005,
        entropy_weight: float = 0.0,
        caps_dropout: float = 0.0,
        decoder_dropout: float = 0.0,
        normalize: str | list[list[float]] | None = None,
        adversarial: str | None = None,
        adversarial_eps: float = 0.1,
        adversarial_steps: int = 10,
        adversarial_share: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        op = "capsfast.train.Learner"
        options = plain_options(options or {})
        loss = loss if loss is None or isinstance(loss, str) else path_of(op, "loss", loss)
        self.save_hyperparameters(logger=False)
        positive = {"lr": lr, "decay_rate": decay_rate, "decay_steps": decay_steps, "clip": clip}
        for name, value in positive.items():
            if value is not None:
                _arguments.positive(op, name, value)
        weights = {"weight_decay": weight_decay, "reconstruction_weight": reconstruction_weight}
        for name, value in {"warmup_steps": warmup_steps, **weights, "entropy_weight": entropy_weight}.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{op}: {name} must not be negative, got {checks.shown(value)}")
        for name, value in {"caps_dropout": caps_dropout, "decoder_dropout": decoder_dropout}.items():
            if not 0 <= value < 1:
                raise ValueError(f"{op}: {name} must be at least 0 and below 1, got {checks.shown(value)}")
        checks.choice(op, "schedule", schedule, SCHEDULES)
        self.sizes = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
        self.class_names: list[str] = class_names or [str(j) for j in range(num_classes)]
        self.seed = seed
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model: Any = build(model, self.sizes, options)
        if isinstance(self.model, Network):
            self.model.class_names = class_names  # save_pretrained keeps them
        self.lr = lr
        self.weight_decay = weight_decay
        self.clip = clip
        self.decay: Decay | Cosine
        if schedule == "cosine":
            self.decay = Cosine(warmup_steps, decay_steps or 0)
        else:
            self.decay = Decay(warmup_steps, decay_rate, decay_steps or DECAY_STEPS)
        self.class_loss = ClassLoss(loss or OWN_LOSS.get(model, "margin"), spread_steps)
        self.reconstruction_loss = ReconstructionLoss()
        self.reconstruction_weight = reconstruction_weight
        self.normalize = None if normalize is None else Normalize(normalize, in_channels)
        self.adversary = None
        if adversarial is not None:
            self.adversary = Adversary(adversarial, adversarial_eps, adversarial_steps, adversarial_share)
        self.tested_at: int | None = None
        self.chance = 1 / num_classes  # the accuracy of guessing
        self.has_classes = model not in WITHOUT_CLASSES
        if not self.has_classes and type(self).monitor == Learner.monitor:
            self.monitor = ("test_reconstruction", "min")
        if loss is not None and not self.has_classes:
            got = checks.shown(loss)
            raise ValueError(f"{op}: loss is that of classes, of which {model} has none; leave it out, got {got}")
        if adversarial is not None and not self.has_classes:
            raise ValueError(f"{op}: adversarial needs a network with classes, got {model}")
        self.entropy: CouplingEntropy | None = None
        self.entropy_weight = entropy_weight
        if entropy_weight:
            routing = getattr(self.model, "routing", None)
            if not isinstance(routing, RoutedCaps):
                raise ValueError(f"{op}: entropy_weight needs a network that routes to its capsules, got {model}")
            self.entropy = CouplingEntropy(getattr(routing.routing, "softmax", "out"))
        if caps_dropout:
            drop_capsules(self.model, caps_dropout)
        if decoder_dropout:
            drop_hidden(self.model, decoder_dropout)

    @property
    def has_decoder(self) -> bool:
        return getattr(self.model, "decoder", None) is not None

    @property
    def weighs_reconstruction(self) -> bool:
        """Whether a reconstruction is one part of the loss beside another, which reconstruction_weight is for."""
        return self.has_decoder and self.has_classes | (self.hparams["model"] == "segcaps")

    def check_decoder(self, name: str) -> None:
        """Raises ValueError in the name of a function that needs class capsules with a decoder."""
        if not (self.has_classes and self.has_decoder):
            why = "was trained without reconstruction" if self.has_classes else "has no classes"
            raise ValueError(f"capsfast.train.{name}: class capsules with a decoder are needed; this network {why}")

    def normalized(self, images: Tensor) -> Tensor:
        """``images [B, C, H, W]`` in [0, 1] as ``model`` takes them."""
        return images if self.normalize is None else self.normalize(images)

    def output(self, images: Tensor, labels: Tensor | None = None) -> Any:
        """What the network makes of images in [0, 1]: :class:`capsfast.models.CapsNetOutput`."""
        return self.model(self.normalized(images), *(() if labels is None else (labels,)))

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of images in [0, 1]."""
        return self.model.classify(self.normalized(images))  # type: ignore[no-any-return]

    def encode(self, images: Tensor) -> Tensor:
        """The capsules that are routed to the classes, of images in [0, 1]."""
        return self.model.encode(self.normalized(images))  # type: ignore[no-any-return]

    def losses(self, batch: Batch) -> tuple[LossParts, Tensor]:
        """The parts of the loss, means over the batch, and the capsules' lengths ``[B, J]``.

        Whatever the loss of the classes is, it stands under ``margin``.
        """
        found, output = self.measured(batch)
        margin = found.get(self.class_loss.log_name, torch.zeros_like(found["loss"]))
        return LossParts(found["loss"], margin, found["reconstruction"]), output.lengths

    def measured(self, batch: Batch, shown: Tensor | None = None) -> tuple[dict[str, Tensor], Any]:
        """The loss and its parts by their names in the log, means over the batch, and the network's output.

        Args:
            batch: the images, and what the decoder is to make.
            shown: what the network sees instead of the images of the batch.

        The parts are ``loss``, that of the classes (``margin``, ``mse``, ``spread`` or ``cross_entropy``),
        ``margin_present`` and ``margin_absent``, whose sum is ``margin``, ``reconstruction``, and ``entropy`` where it
        is part of the loss.
        """
        images, labels, parts = batch
        shown = images if shown is None else shown
        coupling: Any = recorded(self.model.routing, shares=True) if self._adds_entropy else nullcontext([])
        with coupling as couplings:
            output = self.output(shown, *(() if not self.has_classes else (labels if parts is None else labels[:, 0],)))
        found: dict[str, Tensor] = {}
        if self.has_classes:
            logs = self._log_probabilities(output.capsules)
            of_classes = self.class_loss(output.lengths, labels, self.global_step, logs).mean()
            found |= {"loss": of_classes, self.class_loss.log_name: of_classes}
            found |= {name: value.mean() for name, value in self.class_loss.parts(output.lengths, labels).items()}
            errors = [] if output.reconstruction is None else [self._error(output.reconstruction, batch, 0)]
            if parts is not None and self.has_decoder:
                errors.append(self._error(self.model.reconstruct(output.capsules, labels[:, 1]), batch, 1))
            for error in errors:
                found["loss"] = found["loss"] + self.reconstruction_weight * error
            found["reconstruction"] = sum(errors, torch.zeros_like(of_classes))
        else:
            error = self.reconstruction_loss(output.reconstruction, images)
            found = {"loss": error, "reconstruction": error}
        if self._adds_entropy and self.entropy is not None:
            found["entropy"] = self.entropy(couplings[-1])
            found["loss"] = found["loss"] + self.entropy_weight * found["entropy"]
        return found, output

    @property
    def _adds_entropy(self) -> bool:
        return self.entropy is not None and self.training

    def _error(self, reconstruction: Tensor, batch: Batch, n: int) -> Tensor:
        """Against the image, of overlapping ones against that of the n-th object."""
        wanted = batch.images if batch.parts is None else batch.parts[:, n]
        return self.reconstruction_loss(reconstruction, wanted)  # type: ignore[no-any-return]

    def absent_error(self, batch: Batch, output: Any) -> Tensor:
        """The reconstruction error of the longest capsule whose class is not there, mean over the batch.

        Against the same images as ``reconstruction``: how much worse a capsule explains them that has no reason to.
        """
        there = multi_hot(batch.labels, output.lengths.shape[1]).bool()
        longest = output.lengths.masked_fill(there, -torch.inf).argmax(1)
        image = self.model.reconstruct(output.capsules, longest)
        objects = 1 if batch.parts is None else batch.parts.shape[1]
        return torch.stack([self._error(image, batch, n) for n in range(objects)]).sum()

    def class_loss_of(self, labels: Tensor, step: int | None = None) -> Callable[[Tensor], Tensor]:
        """The loss of the classes as a function of images, summed over them: what an attack raises.

        step: of the spread loss; None: with its last margin.
        """
        step = self.class_loss.spread_steps if step is None else step

        def loss(images: Tensor) -> Tensor:
            poses, activations = self.classify(images)
            found: Tensor = self.class_loss(activations, labels, step, self._log_probabilities(poses)).sum()
            return found

        return loss

    def _log_probabilities(self, poses: Tensor) -> Tensor | None:
        return poses[:, :, 0] if getattr(self.model, "poses_are_log_probabilities", False) else None

    def attacked(self, batch: Batch) -> Tensor:
        """The images of a step, those that the adversary takes changed.

        The network is as in the step, without autocast; its buffers stay as they are.
        """
        images, labels, _ = batch
        count = 0 if self.adversary is None else self.adversary.count(len(images))
        if self.adversary is None or not count:
            return images
        draws = generator(self.seed, "attack", self.global_step, self.global_rank)
        loss = self.class_loss_of(labels[:count], self.global_step)
        # In float16 gradients of images underflow: the scale of the training's loss is not that of this one.
        with _buffers_kept(self), torch.autocast(images.device.type, enabled=False):
            changed = self.adversary(loss, images[:count], draws)
        return torch.cat([changed, images[count:]])

    def setup(self, stage: str) -> None:
        """``normalize="set"`` takes mean and deviation from the images that training begins with."""
        if self.normalize is not None and not self.normalize.known:
            images = getattr(self.trainer, "datamodule", None)
            if not isinstance(images, ImageData):
                raise ValueError('capsfast.train.Learner: normalize="set" needs a capsfast.train.ImageData to train on')
            self.normalize.set(*channel_statistics(images.sets.train))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A cosine that was planned for the whole of a training keeps that length.
        planned = checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY].get("decay_steps")
        if planned and not self.decay.steps:
            self.decay.steps = self.hparams["decay_steps"] = planned

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(seed_for(self.seed, "step", self.global_step, self.global_rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        found, _ = self.measured(batch, self.attacked(batch))
        self.log_dict(found, prog_bar=True)
        self.log("lr", self.lr * self.decay(self.global_step))
        return found["loss"]

    def on_validation_epoch_start(self) -> None:
        # Sums over this process's images, by name; then their number.
        self._sums: dict[str, Tensor] = {}
        self._count = torch.zeros((), device=self.device)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        found, output = self.measured(batch)
        for name, value in self.sums(batch, found, output).items():
            self._sums[name] = self._sums.get(name, torch.zeros_like(value)) + value
        self._count += len(batch.labels)

    def sums(self, batch: Batch, found: dict[str, Tensor], output: Any) -> dict[str, Tensor]:
        """What a test adds up, by name, over the images of a batch; numbers, or vectors ``[n]``.

        found, output: of :meth:`measured`.
        """
        n = len(batch.labels)
        sums = {name: n * value for name, value in found.items() if name != "loss"}
        if self.has_classes:
            objects = 1 if batch.parts is None else batch.parts.shape[1]
            if self.has_decoder and output.lengths.shape[1] > objects:
                sums["reconstruction_absent"] = n * self.absent_error(batch, output)
            J = output.lengths.shape[1]
            self.chance = 1 / J if objects == 1 else 2 / (J * (J - 1))
            sums["accuracy"] = right_predictions(output.lengths, batch.labels).sum()
            # Of the capsules of the classes that are there: near 0, the squash passes no gradient on.
            sums["length"] = output.lengths.gather(1, batch.labels.view(n, -1)).sum() / objects
        return sums

    def results(self, sums: dict[str, Tensor], count: float) -> dict[str, float]:
        """The results of a test from its sums over ``count`` images."""
        return {name: float(value) / count for name, value in sums.items()}

    def on_validation_epoch_end(self) -> None:
        names = sorted(self._sums)
        sizes = [self._sums[name].numel() for name in names]
        # In float64: counts of pixels are more than float32 holds.
        sums = torch.cat([*(self._sums[name].flatten() for name in names), self._count[None]]).double()
        *values, count = self.trainer.strategy.reduce(sums, reduce_op="sum").split([*sizes, 1])
        self.tested_at = self.global_step
        found = self.results(dict(zip(names, values, strict=True)), count.item())
        # The same on all processes already; Lightning wants to be told.
        self.log_dict({f"test_{name}": value for name, value in found.items()}, prog_bar=True, sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        # Here and not in the trainer: it is kept in the checkpoint.
        if self.clip is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.clip, gradient_clip_algorithm="norm")

    def make_optimizer(self) -> torch.optim.Optimizer:
        """That of the training, at the learning rate after the warm-up."""
        if self.weight_decay:
            return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def configure_optimizers(self) -> Any:
        if not self.decay.steps:
            planned = self.trainer.estimated_stepping_batches
            if not 0 < planned < float("inf"):
                raise ValueError("capsfast.train.Learner: a cosine over training without end needs decay_steps")
            # Kept, so that a resumed run with another end goes on with this one.
            self.decay.steps = self.hparams["decay_steps"] = int(planned)
        optimizer = self.make_optimizer()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
