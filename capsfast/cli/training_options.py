"""The options of ``train`` for learning and images, as types of its arguments."""

from typing import Annotated, Any

import typer

from .common import on_command_line
from .endings import stop

# The names of capsfast.train.NETWORKS, which is not imported before it is needed.
MODELS = (
    "capsnet",
    "deepcaps",
    "autoencoder",
    "cnn",
    "segcaps",
    "stacked",
    "matrixcapsnet",
    "efficientcapsnet",
    "invertedattention",
)

# By where they go; a resumed run takes all of them from its checkpoint. normalize goes to both.
LEARNING = (
    "loss",
    "spread_steps",
    "lr",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "decay_rate",
    "decay_steps",
    "clip",
    "reconstruction_weight",
    "entropy_weight",
    "caps_dropout",
    "decoder_dropout",
    "adversarial",
    "adversarial_eps",
    "adversarial_steps",
    "adversarial_share",
    "seed",
)
IMAGES = (
    "data",
    "batch_size",
    "image_size",
    "shift",
    "rotation",
    "scale",
    "crop",
    "crop_padding",
    "flip",
    "brightness",
    "contrast",
    "cutout",
    "seed",
    "workers",
)


# Options that another one makes use of: its argument, the values that do, and how it is said.
NEEDS = {
    "decay_rate": ("schedule", ("exponential",), "--schedule exponential"),
    "spread_steps": ("loss", ("spread",), "--loss spread"),
    "adversarial_eps": ("adversarial", ("fgsm", "pgd"), "--adversarial"),
    "adversarial_steps": ("adversarial", ("pgd",), "--adversarial pgd"),
    "adversarial_share": ("adversarial", ("fgsm", "pgd"), "--adversarial"),
}


def check_used(context: typer.Context) -> None:
    """Ends a new training that was given an option which nothing would heed."""
    if context.params["resume"] is not None:  # which takes none of them
        return
    for name, (other, values, said) in NEEDS.items():
        if on_command_line(context, name) and context.params[other] not in values:
            raise stop(f"capsfast train: --{name.replace('_', '-')} needs {said}")


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _learning(text: str, **more: Any) -> Any:
    return _option("Learning", text, **more)


def _images(text: str, *names: str, **more: Any) -> Any:
    return _option("Images", text, *names, **more)


Loss = Annotated[
    str | None,
    _learning("Of the classes: margin, mse, spread, cross-entropy.", show_default="margin; cnn: cross-entropy"),
]
SpreadSteps = Annotated[int, _learning("Steps over which the spread loss's margin grows.", min=1)]
LearningRate = Annotated[float, _learning("Learning rate after the warm-up.")]
WeightDecay = Annotated[float, _learning("Of AdamW; 0: Adam.", min=0)]
Schedule = Annotated[str, _learning("exponential or cosine.")]
WarmupSteps = Annotated[int, _learning("Steps over which lr grows to its value.", min=0)]
DecayRate = Annotated[float, _learning("Factor on lr every decay-steps, exponential alone.")]
DecaySteps = Annotated[
    int | None,
    _learning("For decay-rate; of a cosine, until 0.", min=1, show_default="2000; cosine: the whole training"),
]
Clip = Annotated[float | None, _learning("Largest gradient norm.")]
ReconstructionWeight = Annotated[float, _learning("Factor on the squared error of an image.", min=0)]
EntropyWeight = Annotated[float, _learning("Factor on the entropy of the last coupling.", min=0)]
CapsDropout = Annotated[float, _learning("Share of primary capsules left out.", min=0)]
DecoderDropout = Annotated[float, _learning("Share of the decoder's hidden units left out.", min=0)]
Adversarial = Annotated[str | None, _learning("Train on attacked images: fgsm or pgd.")]
AdversarialEps = Annotated[float, _learning("Largest change of a pixel.")]
AdversarialSteps = Annotated[int, _learning("Of PGD.", min=1)]
AdversarialShare = Annotated[float, _learning("Of the images of a step.")]

ImageSize = Annotated[int | None, _images("Resize to.", min=1)]
Shift = Annotated[int | None, _images("Pixels; default 2 of 28.", min=0, show_default=False)]
Rotation = Annotated[float, _images("Degrees.", min=0)]
Scale = Annotated[float, _images("Fraction.", min=0)]
Crop = Annotated[int | None, _images("Squares of this size; tests: from the middle.", min=1)]
CropPadding = Annotated[int, _images("Pixels of black around an image before the crop.", min=0)]
Flip = Annotated[bool, _images("Mirror half of the images.", "--flip")]
Brightness = Annotated[float, _images("Up to so much is added or taken away, of 1 for white.", min=0)]
Contrast = Annotated[float, _images("Fraction.", min=0)]
Cutout = Annotated[int | None, _images("Side of a square that takes the mean colour.", min=1)]
Normalize = Annotated[
    str | None,
    _images("Mean 0, deviation 1: set (of the training images as they are stored) or image (of each)."),
]
