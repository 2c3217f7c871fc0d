"""The models by their names on the command line, or by class path."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ..calls import checks
from ..models import (
    CNN,
    CapsAutoEncoder,
    CapsNet,
    DeepCaps,
    EfficientCapsNet,
    InvertedAttentionCapsNet,
    MatrixCapsNet,
    SegCaps,
    StackedCapsuleAutoencoder,
)
from ..models._network import MOVED, Network
from ..models.output import CapsNetOutput
from ..nn import Capsules
from ..nn.routing.names import routing_class
from ..storage.dotted import by_path, path_of
from ..storage.files import reading

NETWORKS: dict[str, type[Network]] = {
    "capsnet": CapsNet,
    "deepcaps": DeepCaps,
    "autoencoder": CapsAutoEncoder,
    "cnn": CNN,
    "segcaps": SegCaps,
    "stacked": StackedCapsuleAutoencoder,
    "matrixcapsnet": MatrixCapsNet,
    "efficientcapsnet": EfficientCapsNet,
    "invertedattention": InvertedAttentionCapsNet,
}
# Models that do not classify images.
WITHOUT_CLASSES = ("autoencoder", "segcaps", "stacked")
# Models whose default loss is not the margin loss.
OWN_LOSS = {"cnn": "cross-entropy"}


class OwnNetwork(nn.Module):
    """Adapts a user's network: images ``[B, C, H, W]`` to :class:`capsfast.models.CapsNetOutput`.

    Args:
        network: its forward takes images only and returns class capsules ``[B, J, D]``, whose lengths are the
            activations, or activations ``[B, J]``.
    """

    decoder = None

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor | None = None) -> CapsNetOutput:
        poses, activations = self.classify(images)
        return CapsNetOutput(activations, poses, None)

    def classify(self, images: Tensor) -> Capsules:
        """
        Raises:
            TypeError: the network returns something else.
        """
        output = self.network(images)
        if not isinstance(output, Tensor) or output.dim() not in (2, 3) or len(output) != len(images):
            got = checks.shape_of(output) if isinstance(output, Tensor) else type(output).__name__
            raise TypeError(
                f"capsfast.train.Learner: model {type(self.network).__name__} must give class capsules [B, J, D] or "
                f"activations [B, J], got {got}; a network with classify(images) may return anything"
            )
        return Capsules(output, output.norm(dim=2)) if output.dim() == 3 else Capsules(output[:, :, None], output)


def network_class(op: str, name: str) -> type[nn.Module]:
    """The network class with a name or class path.

    Raises:
        ValueError: no model with that name, or no such class.
        TypeError: not an nn.Module class.
    """
    if "." not in name:
        checks.choice(op, "model", name, NETWORKS)
        return NETWORKS[name]
    located = by_path(f"{op}: model", name)
    if not (inspect.isclass(located) and issubclass(located, nn.Module)):
        raise TypeError(f"{op}: model must be a class of networks, an nn.Module, got {name}")
    return located


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a checkpoint: a routing class is replaced by its path.

    Raises:
        ValueError: another process could not import the class.
    """
    routing = options.get("routing")
    if routing is None or isinstance(routing, str):
        return dict(options)
    routing_class("capsfast.train.Learner", routing)
    return {**options, "routing": path_of("capsfast.train.Learner", "routing", routing)}


def build(name: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> nn.Module:
    """A model with the sizes ``in_channels``, ``image_size`` and ``num_classes`` of a data set.

    Raises:
        ValueError, TypeError: no model with that name, an option that it does not have, or a value that it rejects.
    """
    op = "capsfast.train.build"
    make, options = network_class(op, name), dict(options)
    if isinstance(options.get("routing"), str) and "." in options["routing"]:
        options["routing"] = routing_class(op, by_path(f"{op}: routing", options["routing"]))
    taken = inspect.signature(make).parameters
    try:
        network = make(**{size: value for size, value in sizes.items() if size in taken}, **options)
    except TypeError as error:
        # A network passes unknown options on to its layers, so the error may come from a layer.
        if options.keys() <= taken.keys():
            raise
        fixed = (*sizes, "device", "dtype", "options")
        open_parameters = ", ".join(parameter for parameter in taken if parameter not in fixed)
        raise TypeError(f"{op}: {name}'s own options are {open_parameters}; {error}") from None
    return network if hasattr(network, "classify") or name in NETWORKS else OwnNetwork(network)


def read_pretrained(op: str, model: str, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The arguments of a :class:`Learner` that a pretrained network was made with, and the tensors of its state.

    Args:
        op: begins messages.
        model: as for :class:`Learner`.
        name: as for ``from_pretrained`` of the model, or a file that ``capsfast train`` wrote.

    Raises:
        ValueError: a network that has no ``from_pretrained``, a checkpoint of another model, a file that is no
            checkpoint, or images that are not square.
        OSError, ValueError, ModuleNotFoundError, RuntimeError: as ``from_pretrained``.
    """
    path = Path(name).expanduser()
    if path.is_file() or path.suffix == ".ckpt":
        with reading(op, path, "a checkpoint", "name one that capsfast train wrote", quoted=False):
            content = torch.load(path, map_location="cpu", weights_only=True)
            held, tensors = dict(content[LightningModule.CHECKPOINT_HYPER_PARAMS_KEY]), dict(content["state_dict"])
            trained, options = held["model"], dict(held["options"] or {})
        if trained != model:
            raise ValueError(f"{op}: model must be {trained}, as in {name}, got {model}")
        return {**held, "options": options}, tensors
    kind = network_class(op, model)
    if not issubclass(kind, Network):
        raise ValueError(f"{op}: model must be one of capsfast.models, or derive from one of them, got {model}")
    network: Any = kind.from_pretrained(name)
    channels, height, width = network.image_shape
    if height != width:
        raise ValueError(f"{op}: the images of {name} must be square, got {height} x {width}")
    options = network._options(op)
    sizes = {"in_channels": channels, "image_size": height, "num_classes": options.get("num_classes", 10)}
    options = {name: value for name, value in options.items() if name not in sizes}
    held = {"model": model, **sizes, "class_names": network.class_names, "options": options}
    return held, {f"model.{name}": tensor for name, tensor in network.state_dict().items()}


def described() -> dict[str, dict[str, Any]]:
    """The models by name: class, parameters for MNIST's images, options with their defaults, pretrained weights."""
    sizes = {"in_channels": 1, "image_size": 28, "num_classes": 10}
    networks: dict[str, dict[str, Any]] = {}
    for name, kind in NETWORKS.items():
        with torch.device("meta"):
            network = build(name, sizes, {})
        taken = inspect.signature(kind).parameters.values()
        named = [
            parameter
            for parameter in taken
            if parameter.default is not parameter.empty and parameter.name not in (*sizes, *MOVED)
        ]
        networks[name] = {
            "class": f"{kind.__module__.rpartition('.')[0]}.{kind.__name__}",
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
            "options": {parameter.name: parameter.default for parameter in named},
            "pretrained": [*kind._shipped()],
        }
    return networks
