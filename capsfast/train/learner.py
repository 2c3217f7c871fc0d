"""A network, its loss and its optimizer as a Lightning module."""

from collections.abc import Callable
from contextlib import nullcontext
from math import cos, pi
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from ..calls import checks
from ..compat import optimizer_state
from ..data import Batch, channel_statistics
from ..data.seeds import seed_for
from ..models import CapsNetOutput
from ..models._network import Network, load_fitting, made_from
from ..nn import ReconstructionLoss, RoutedCaps
from ..nn.routing.base import Capsules, SummingRouting
from ..storage.dotted import path_of
from .attacks import lead
from .images import ImageData, check_types
from .networks import OWN_LOSS, WITHOUT_CLASSES, build, plain_options, read_pretrained
from .normalize import Normalize
from .objective import ClassLoss

SCHEDULES = ("exponential", "cosine")
DECAY_STEPS = 2000
# Products in a weighted sum of Sabour, Frosst, Hinton (2017), by the number of output capsules that share them.
AUTHORS_PRODUCTS = 1152 * 8 / 10
# Metrics in the log that progress does not show.
DETAILS = ("margin_present", "margin_absent", "length")


def found_classes(lengths: Tensor, labels: Tensor) -> Tensor:
    """Which of the ``labels`` (``[B]`` or ``[B, n]``) have the largest ``lengths [B, J]``, bool ``[B, n]``."""
    wanted = labels[:, None].flatten(1)
    guesses = lengths.topk(wanted.shape[1], dim=1).indices
    return (guesses[:, :, None] == wanted[:, None]).any(1)


def right_predictions(lengths: Tensor, labels: Tensor) -> Tensor:
    """Whether the largest ``lengths [B, J]`` belong to ``labels`` (``[B]`` or ``[B, n]``), bool ``[B]``."""
    return found_classes(lengths, labels).all(1)


def decay(step: int, warmup_steps: int, steps: int, rate: float | None = None) -> float:
    """The factor on the learning rate: a linear warm-up, times ``rate ** (step / steps)``.

    Without a rate, the warm-up is multiplied by half a cosine that falls from 1 to 0 over ``steps`` and then stays 0
    (Loshchilov, Hutter 2017, eq. 5, without restarts).
    """
    warm = min(1.0, (step + 1) / (warmup_steps + 1))
    if rate is not None:
        return warm * float(rate ** (step / steps))
    return warm * 0.5 * (1 + cos(pi * min(1.0, step / steps)))


class _OfItsModel(pl.LightningModule):
    """Makes an object of the Learner class that the model needs."""

    _classes: ClassVar[dict[str, type["Learner"]]] = {}

    def __init_subclass__(cls, model: str | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if model is not None:
            _OfItsModel._classes[model] = cls  # type: ignore[assignment]

    def __new__(cls, model: str = "capsnet", *_: Any, **__: Any) -> "_OfItsModel":
        # Copies and unpickled learners come without a model name; cls is already right.
        return super().__new__(cls._classes.get(model, cls) if cls is Learner else cls)


class Learner(_OfItsModel):
    """Trains a capsule network: margin loss and reconstruction by Adam (Sabour, Frosst, Hinton 2017, section 4).

    Overlapping images have two labels: the margin loss counts both classes, and the decoder reconstructs each object
    from its own capsule (section 6 there). An auto-encoder has only the reconstruction loss.

    Every step seeds torch from seed, step and rank, so that a resumed run draws the same numbers as an uninterrupted
    run. The model decides the class of the object: segcaps makes a :class:`SegmentationLearner`, stacked a
    :class:`StackedLearner`.

    Args:
        model: capsnet, deepcaps, efficientcapsnet, invertedattention, matrixcapsnet, segcaps, autoencoder, stacked or
            cnn, or the class path of your own network, whose forward returns class capsules or activations.
        in_channels: channels of the images.
        image_size: height and width of the images in pixels.
        num_classes: number of classes.
        class_names: names of the classes; default: numbers.
        options: options of the model by their names, such as conv_channels or routing. Your own routing is given by
            its class path, such as my_module.MyRouting.
        lr: learning rate after the warm-up.
        weight_decay: trains with AdamW instead of Adam: each step also shrinks every parameter by the factor
            1 - weight_decay * learning rate (Loshchilov, Hutter 2019).
        schedule: how the learning rate falls: exponential or cosine.
        warmup_steps: number of steps in which the learning rate grows linearly.
        decay_rate: the exponential schedule multiplies the learning rate by decay_rate every decay_steps, smoothly.
        decay_steps: see decay_rate; a cosine falls to 0 over this many steps. Default: 2000; for a cosine, all steps
            of the training.
        routing_lr: learning rate of W of the layers with dynamic routing. A step of Adam moves every number of W by the
            learning rate, and so a weighted sum by up to in_caps * in_dim / out_caps times as much, in the authors'
            layer 1152 * 8 / 10 times. Default: lr, and where the factor is larger, as much less.
        clip: largest norm of all gradients together; default: no clipping.
        loss: loss of the classes: margin, mse, spread, cross-entropy, or a class path, see
            :class:`capsfast.train.objective.ClassLoss`. Default: margin, for cnn cross-entropy. A network without
            classes has its own loss.
        spread_steps: number of steps in which the margin of the spread loss grows.
        reconstruction_weight: factor of the squared error of an image, summed over its pixels.
        normalize: how images are normalised before the network: image (mean 0, deviation 1 for each image) or set (the
            same for each channel of the training images). Default: not at all. Losses, attacks and reconstructions use
            the images in [0, 1].
        pretrained: initial weights: a network that comes with the package such as mnist, a folder from save_pretrained,
            a repository on the Hugging Face Hub, or a checkpoint of capsfast train. Its options, and normalize of a
            checkpoint, hold where they are not given. Tensors that do not fit are drawn anew, and a warning names them.
        seed: seed of the initial weights and of random numbers in training.

    Raises:
        ValueError, TypeError: unknown model, an option that the model does not take, numbers out of range, or an
            option for a part that the network does not have.
        OSError, ValueError, RuntimeError: pretrained can't be read, is of another model, or no parameter of it fits.
    """

    # The metric that selects the best checkpoint.
    monitor = ("val_accuracy", "max")

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
        routing_lr: float | None = None,
        weight_decay: float = 0.0,
        schedule: str = "exponential",
        warmup_steps: int = 0,
        decay_rate: float = 0.96,
        decay_steps: int | None = None,
        clip: float | None = None,
        loss: str | Callable[..., Tensor] | None = None,
        spread_steps: int = 10_000,
        reconstruction_weight: float = 0.0005,
        normalize: str | None = None,
        pretrained: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        op = "capsfast.train.Learner"
        in_channels, image_size, num_classes, warmup_steps, decay_steps, spread_steps, seed, options = checks.plain(
            (in_channels, image_size, num_classes, warmup_steps, decay_steps, spread_steps, seed, options)
        )
        lr, routing_lr, weight_decay, decay_rate, clip, reconstruction_weight = checks.plain(
            (lr, routing_lr, weight_decay, decay_rate, clip, reconstruction_weight)
        )
        check_types(op, Learner.__init__, {name: value for name, value in locals().items() if name != "self"})
        options = plain_options(options or {})
        loss = loss if loss is None or isinstance(loss, str) else path_of(op, "loss", loss)
        tensors: dict[str, Tensor] | None = None
        if pretrained is not None:
            held, tensors = read_pretrained(op, model, str(pretrained))
            if normalize is not None:  # the mean and deviation of the images of this training
                tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("normalize.")}
            options, normalize = {**held["options"], **options}, normalize or held.get("normalize")
        # The checkpoint holds the options and weights themselves, and is opened without the pretrained network.
        self.save_hyperparameters(logger=False, ignore="pretrained")
        rates = {"lr": lr, "routing_lr": routing_lr, "decay_rate": decay_rate}
        for name, value in {**rates, "decay_steps": decay_steps, "clip": clip}.items():
            if value is not None:
                checks.positive(op, name, value)
        weights = {"weight_decay": weight_decay, "reconstruction_weight": reconstruction_weight}
        for name, value in {"warmup_steps": warmup_steps, **weights}.items():
            checks.positive(op, name, value, zero=True)
        checks.choice(op, "schedule", schedule, SCHEDULES)
        self.sizes = {"in_channels": in_channels, "image_size": image_size, "num_classes": num_classes}
        if class_names and not len(class_names) == len({*class_names}) == num_classes:
            raise ValueError(f"{op}: class_names must hold {num_classes} different names, got {class_names}")
        self.class_names: list[str] = class_names or [str(j) for j in range(num_classes)]
        self.seed = seed
        source = nullcontext() if tensors is None else made_from(op, f"{pretrained} and of this call")
        with torch.random.fork_rng(), source:
            torch.manual_seed(seed)
            self.model: Any = build(model, self.sizes, options)
        if isinstance(self.model, Network):
            self.model.class_names = class_names  # save_pretrained keeps them
        self.lr = lr
        # None: a cosine over all steps of the training, whose number is not known yet.
        self.decay_steps = decay_steps or (None if schedule == "cosine" else DECAY_STEPS)
        self.class_loss = ClassLoss(loss or OWN_LOSS.get(model, "margin"), spread_steps)
        self.reconstruction_loss = ReconstructionLoss()
        self.reconstruction_weight = reconstruction_weight
        self.normalize = None if normalize is None else Normalize(normalize, in_channels)
        self.tested_at: int | None = None
        self.chance = 1 / num_classes  # the accuracy of guessing
        self.has_classes = model not in WITHOUT_CLASSES
        if not self.has_classes and type(self).monitor == Learner.monitor:
            self.monitor = ("val_reconstruction", "min")
        if loss is not None and not self.has_classes:
            got = checks.shown(loss)
            raise ValueError(f"{op}: loss compares classes, and {model} has none; leave it out, got {got}")
        if self.has_classes:
            self.accuracy = MeanMetric()
        if tensors is not None and (said := load_fitting(op, pretrained, self, tensors)):
            rank_zero_warn(said)

    @property
    def has_decoder(self) -> bool:
        return getattr(self.model, "decoder", None) is not None

    def check(self, name: str, *, decoder: bool = False) -> None:
        """Raises ValueError, naming a function, unless the network has classes, and with ``decoder`` a decoder too."""
        if self.has_classes and (self.has_decoder or not decoder):
            return
        why = "was trained without reconstruction" if self.has_classes else "has no classes"
        what = "class capsules with a decoder are" if decoder else "a network with classes is"
        raise ValueError(f"capsfast.train.{name}: {what} needed; this network, {self.hparams['model']}, {why}")

    def normalized(self, images: Tensor) -> Tensor:
        """``images [B, C, H, W]`` in [0, 1] as ``model`` takes them."""
        return images if self.normalize is None else self.normalize(images)

    def output(self, images: Tensor, labels: Tensor | None = None) -> CapsNetOutput:
        """The output of the network for images in [0, 1]: :class:`capsfast.models.CapsNetOutput`."""
        return self.model(self.normalized(images), *(() if labels is None else (labels,)))  # type: ignore[no-any-return]

    def classify(self, images: Tensor) -> Capsules:
        """The class capsules of images in [0, 1]."""
        return self.model.classify(self.normalized(images))  # type: ignore[no-any-return]

    def encode(self, images: Tensor) -> Tensor:
        """The input capsules of the class routing, from images in [0, 1]."""
        return self.model.encode(self.normalized(images))  # type: ignore[no-any-return]

    def measured(self, batch: Batch) -> tuple[dict[str, Tensor], Any]:
        """The loss and its parts by their names in the log, means over the batch, and the network's output.

        The names are ``loss``; the loss of the classes (``margin``, ``mse``, ``spread`` or ``cross_entropy``);
        ``margin_present`` and ``margin_absent``, whose sum is ``margin``; and ``reconstruction``.
        """
        images, labels, parts = batch
        if not self.has_classes:
            output = self.output(images)
            error = self.reconstruction_loss(output.reconstruction, images)  # type: ignore[arg-type]
            return {"loss": error, "reconstruction": error}, output
        output = self.output(images, labels if parts is None else labels[:, 0])
        of_classes = self._class_loss(output.capsules, output.lengths, labels, self.global_step).mean()
        losses = {"loss": of_classes, self.class_loss.log_name: of_classes}
        losses |= {name: value.mean() for name, value in self.class_loss.parts(output.lengths, labels).items()}
        errors = [] if output.reconstruction is None else [self._error(output.reconstruction, batch, 0)]
        if parts is not None and self.has_decoder:
            errors.append(self._error(self.model.reconstruct(output.capsules, labels[:, 1]), batch, 1))
        for error in errors:
            losses["loss"] = losses["loss"] + self.reconstruction_weight * error
        losses["reconstruction"] = sum(errors, torch.zeros_like(of_classes))
        return losses, output

    def _error(self, reconstruction: Tensor, batch: Batch, n: int) -> Tensor:
        """The error against the image; for overlapping images against the image of the n-th object."""
        wanted = batch.images if batch.parts is None else batch.parts[:, n]
        return self.reconstruction_loss(reconstruction, wanted)  # type: ignore[no-any-return]

    def class_loss_of(self, labels: Tensor) -> Callable[[Tensor], Tensor]:
        """The loss of the classes as a function of images, summed over images.

        The spread loss uses its final margin. The margin loss and the spread loss are 0 where the network is sure, and
        have no gradient there: an attack on them alone leaves these images as they are.
        """

        def loss(images: Tensor) -> Tensor:
            poses, activations = self.classify(images)
            return self._class_loss(poses, activations, labels, self.class_loss.spread_steps).sum()

        return loss

    def lead_of(self, labels: Tensor) -> Callable[[Tensor], Tensor]:
        """:func:`lead` over ``labels`` (``[B]`` or ``[B, n]``) as a function of images, summed over images.

        The scores are the activations, for ``cnn`` the log-probabilities.
        """

        def total(images: Tensor) -> Tensor:
            poses, activations = self.classify(images)
            logs = self._log_probabilities(poses)
            return lead(activations if logs is None else logs, labels).sum()

        return total

    def _class_loss(self, poses: Tensor, activations: Tensor, labels: Tensor, step: int) -> Tensor:
        losses: Tensor = self.class_loss(activations, labels, step, self._log_probabilities(poses))
        return losses

    def _log_probabilities(self, poses: Tensor) -> Tensor | None:
        return poses[:, :, 0] if getattr(self.model, "poses_are_log_probabilities", False) else None

    def setup(self, stage: str) -> None:
        """``normalize="set"`` takes mean and deviation from the training images when training begins."""
        if self.normalize is not None and not self.normalize.known:
            images = getattr(self.trainer, "datamodule", None)
            if not isinstance(images, ImageData):
                raise ValueError('capsfast.train.Learner: normalize="set" needs a capsfast.train.ImageData to train on')
            self.normalize.set(*channel_statistics(images.sets.train))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # A cosine over the whole training keeps the length that was planned at first.
        planned = checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY].get("decay_steps")
        if planned and not self.decay_steps:
            self.decay_steps = self.hparams["decay_steps"] = planned

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        torch.manual_seed(seed_for(self.seed, "step", self.global_step, self.global_rank))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        losses, _ = self.measured(batch)
        self._log(losses)
        self.log("lr", self.lr * self._decay(self.global_step))
        return losses["loss"]

    def _log(self, found: dict[str, Any], part: str = "", **options: Any) -> None:
        for name, value in found.items():
            self.log(f"{part}{name}", value, prog_bar=name not in DETAILS, **options)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        # Without images for validation these are the images for tests.
        self._log_results(batch, getattr(getattr(self.trainer, "datamodule", None), "watched", "val"))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._log_results(batch, "test")

    def _log_results(self, batch: Batch, part: str) -> None:
        results = self.results(batch, *self.measured(batch))
        # Lightning averages over all images of all processes.
        self._log(results, f"{part}_", sync_dist=True, batch_size=len(batch.labels))

    def results(self, batch: Batch, found: dict[str, Tensor], output: Any) -> dict[str, Tensor | Metric]:
        """The results of a test by name: means over a batch, and metrics that accumulate over batches.

        found, output: from :meth:`measured`.
        """
        results: dict[str, Tensor | Metric] = {name: value for name, value in found.items() if name != "loss"}
        if self.has_classes:
            J, objects = output.lengths.shape[1], 1 if batch.parts is None else batch.parts.shape[1]
            self.chance = 1 / J if objects == 1 else 2 / (J * (J - 1))
            self.accuracy.update(right_predictions(output.lengths, batch.labels))
            # The length of the capsules of present classes: near 0 the squash has no gradient.
            length = output.lengths.gather(1, batch.labels[:, None].flatten(1)).mean()
            results |= {"accuracy": self.accuracy, "length": length}
        return results

    def on_validation_epoch_end(self) -> None:
        self.tested_at = self.global_step

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        # Here and not in the trainer, so that the checkpoint holds the option.
        if self.hparams["clip"] is not None:
            self.clip_gradients(optimizer, gradient_clip_val=self.hparams["clip"], gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        if not self.decay_steps:
            planned = self.trainer.estimated_stepping_batches
            if not 0 < planned < float("inf"):
                raise ValueError("capsfast.train.Learner: a cosine over training without end needs decay_steps")
            # Stored, so that a resumed run with a different end keeps this schedule.
            self.decay_steps = self.hparams["decay_steps"] = int(planned)
        # AdamW without weight decay is Adam.
        optimizer = torch.optim.AdamW(self._groups(), lr=self.lr, weight_decay=self.hparams["weight_decay"])
        optimizer.register_load_state_dict_pre_hook(optimizer_state)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._decay)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _groups(self) -> list[dict[str, Any]]:
        """The parameters by their learning rate."""
        rates = dict.fromkeys(self.parameters(), self.lr)
        for layer in (module for module in self.model.modules() if isinstance(module, RoutedCaps)):
            W = layer._parameters.get("W")
            if W is not None and isinstance(layer.routing, SummingRouting):
                inputs = layer.out_caps if layer.routing.softmax == "in" else layer.in_caps
                factor = AUTHORS_PRODUCTS * layer.out_caps / (inputs * W.shape[-1])
                rates[W] = self.hparams["routing_lr"] or self.lr * min(1.0, factor)
        by_rate: dict[float, list[Any]] = {}
        for parameter, rate in rates.items():
            by_rate.setdefault(rate, []).append(parameter)
        return [{"params": parameters, "lr": rate} for rate, parameters in by_rate.items()]

    def _decay(self, step: int) -> float:
        rate = self.hparams["decay_rate"] if self.hparams["schedule"] == "exponential" else None
        return decay(step, self.hparams["warmup_steps"], self.decay_steps or DECAY_STEPS, rate)
