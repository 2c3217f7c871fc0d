"""Checkpoints: writes complete files, and reads them back into the network and its data. Pretrained networks."""

import inspect
import io
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from ..data.catalogue import by_part
from ..models._network import load_weights, made_from
from ..storage.files import reading, replacing
from .images import ImageData
from .learner import Learner
from .networks import read_pretrained

# What every checkpoint holds, and what training needs to go on. Lightning looks for these without a check.
HELD: dict[str, Any] = {
    "state_dict": dict,
    Learner.CHECKPOINT_HYPER_PARAMS_KEY: dict,
    ImageData.CHECKPOINT_HYPER_PARAMS_KEY: dict,
    "pytorch-lightning_version": str,
    "global_step": int,
    "loops": {"fit_loop": dict, "validate_loop": dict},
}
HELD_TO_GO_ON: dict[str, Any] = {"callbacks": dict, "optimizer_states": [dict], "lr_schedulers": [dict]}
ANOTHER = "take another one, such as best.ckpt beside it"
DAMAGED = f"it is damaged or something else; {ANOTHER}"


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's writer, except that the old file stays until the new file is complete.

    Lightning writes its draft into the folder for temporary files, which may be on another disk, so that it must copy.

    newest: the last file written, and its step. on_written: called with every file.
    """

    def __init__(self) -> None:
        super().__init__()
        self.newest: tuple[Path, int] | None = None
        self.on_written: Callable[[Path], None] = lambda path: None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        # Into memory first: torch.save reports a full disk without its errno.
        content = io.BytesIO()
        torch.save(checkpoint, content)
        with replacing(Path(path)) as draft:
            draft.write_bytes(content.getbuffer())
        self.newest = Path(path), int(checkpoint["global_step"])
        self.on_written(Path(path))


class Best(ModelCheckpoint):
    """Keeps ``best.ckpt`` of a folder, and knows its result also in a resumed run and after the folder was moved."""

    def reached(self, score: Tensor) -> Path:
        """Records a result as the best. Returns the path of ``best.ckpt``."""
        path = Path(self.dirpath or ".") / "best.ckpt"
        self.best_model_path = self.kth_best_model_path = str(path)
        self.best_model_score = self.kth_value = self.current_score = score
        self.best_k_models = {str(path): score}
        return path

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Lightning forgets the best result in any other folder. In a folder without best.ckpt the next result is best.
        if state_dict["best_model_score"] is not None and (Path(self.dirpath or ".") / "best.ckpt").exists():
            self.reached(state_dict["best_model_score"])


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """The content of a checkpoint of this package, tensors on the CPU.

    No code in the file is run. Opening the network and the data later imports the class paths in the checkpoint.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a checkpoint, not a checkpoint of this package, or options that this version does not have.
    """
    op, path = f"capsfast.train.read_checkpoint: {path}", Path(path)
    if path.is_dir():
        raise FileNotFoundError(f"{op} is a folder; name a file in it, such as last.ckpt")
    if not path.is_file():
        raise FileNotFoundError(f"{op} does not exist; training writes last.ckpt into its folder after every epoch")
    # torch's text recommends running the code in the file.
    with reading("capsfast.train.read_checkpoint", path, "a checkpoint", DAMAGED, quoted=False):
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    if not _holds(content, HELD) or not isinstance(content.get("callbacks", {}), dict):
        raise ValueError(f"{op} is not a checkpoint that capsfast train wrote; {ANOTHER}")
    # Earlier versions held no images out, and had one learning rate.
    held = content[Learner.CHECKPOINT_HYPER_PARAMS_KEY]
    held.setdefault("routing_lr", held.get("lr"))
    content[ImageData.CHECKPOINT_HYPER_PARAMS_KEY].setdefault("hold_out", 0.0)
    for kind in (Learner, ImageData):
        taken, hparams = inspect.signature(kind.__init__).parameters, content[kind.CHECKPOINT_HYPER_PARAMS_KEY]
        # An option of an earlier version that is off changes nothing.
        content[kind.CHECKPOINT_HYPER_PARAMS_KEY] = {
            name: value for name, value in hparams.items() if value or name in taken
        }
        if unknown := content[kind.CHECKPOINT_HYPER_PARAMS_KEY].keys() - taken.keys():
            names = ", ".join(sorted(map(str, unknown)))
            raise ValueError(
                f"{op} has options that this version of capsfast does not have: {names}; use the version that wrote it"
            )
    return content


def _holds(value: Any, kind: Any) -> bool:
    """Whether a value has the type, or holds the types by their keys, or is a list of the type."""
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(_holds(value.get(key), inner) for key, inner in kind.items())
    if isinstance(kind, list):
        return isinstance(value, list) and all(_holds(element, *kind) for element in value)
    return isinstance(value, kind)


def read_to_go_on(path: Path | str, learner: Learner) -> dict[str, Any]:
    """The content of a checkpoint that the training of ``learner`` can continue from; the learner takes its weights.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_checkpoint`; also if it holds no state of a training.
        RuntimeError: the weights are from another network.
    """
    op, content = "capsfast.train.fit", read_checkpoint(path)
    if missing := [key for key, kind in HELD_TO_GO_ON.items() if not _holds(content.get(key), kind)]:
        raise ValueError(f"{op}: {path} can't continue a training: it has no {', no '.join(missing)}; {ANOTHER}")
    load_weights(op, path, learner, content["state_dict"], strict=learner.strict_loading)
    return content


def open_learner(path: Path | str, content: dict[str, Any] | None = None) -> Learner:
    """The trained network in a checkpoint, in evaluation mode.

    content: from :func:`read_checkpoint`, if it is read already.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_checkpoint`; also if the options in it can't be used.
        RuntimeError: the weights are from another network.
    """
    content = content or read_checkpoint(path)
    held, tensors = content[Learner.CHECKPOINT_HYPER_PARAMS_KEY], content["state_dict"]
    return _built("capsfast.train.open_checkpoint", str(path), held, tensors)


def _built(op: str, source: str, held: dict[str, Any], tensors: dict[str, Tensor]) -> Learner:
    with made_from(op, source):
        learner = Learner(**held)
    load_weights(op, source, learner, tensors)
    return learner.eval()


def open_checkpoint(path: Path | str, *, data: Any = None, data_dir: str | None = None) -> tuple[Learner, ImageData]:
    """The trained network, in evaluation mode, and its data, opened.

    Args:
        path: a file that ``capsfast train`` wrote.
        data, data_dir: data to use instead of the training's; sizes and classes must fit. data is a name, an
            :class:`ImageData`, or what :func:`capsfast.data.load` takes: a data set of (image, label), or a tuple
            (train, test) or (train, val, test). A training on such data sets needs it: the checkpoint holds none.

    Raises:
        FileNotFoundError, ValueError, RuntimeError: as :func:`open_learner` and :func:`capsfast.data.open_sets`; also
            if the data does not fit the network, or is missing.
    """
    op, content = "capsfast.train.open_checkpoint", read_checkpoint(path)
    learner, options = open_learner(path, content), dict(content[ImageData.CHECKPOINT_HYPER_PARAMS_KEY])
    if data is None and options.get("data") is None:
        raise ValueError(
            f"{op}: {path} holds no data, it was trained on data sets from Python; give them as data= (--data)"
        )
    if data is not None:
        # No augmentation, and sizes as in training.
        kept: tuple[str, ...] = ("batch_size", "seed", "workers", "image_size", "crop", "crop_padding")
        named = isinstance(data, str | os.PathLike)
        parts = {"data": data} if named else {} if isinstance(data, ImageData) else by_part(data)
        if options.get("data") is None and not {"data", "val"} & parts.keys():
            kept += ("hold_out",)  # the data sets may be those of the training
        options = {name: options[name] for name in kept if name in options} | parts
    if data_dir is not None:
        options["data_dir"] = data_dir
    # Errors in data that the caller names must not blame the checkpoint.
    of_the_caller = data is not None or data_dir is not None
    with nullcontext() if of_the_caller else made_from(op, str(path), "data= (--data) takes other images"):
        images = data if isinstance(data, ImageData) else ImageData(**options)
        assert images.sets
    check_fits(f"{op}: {path}", learner.hparams, images)
    return learner, images


def check_fits(op: str, model: Mapping[str, Any], images: ImageData) -> None:
    """Opens images and compares them with the options ``model`` of a trained network.

    Raises:
        ValueError: images of other sizes, or of other classes; and the errors of :func:`capsfast.data.open_sets`.
    """
    got, source = images.sets.sizes, images.sets.train.source
    wanted, classes, known = {name: model[name] for name in got}, source.classes, model["class_names"]
    name = images.options["data"] or source.name
    if got != wanted:
        raise ValueError(f"{op} needs {wanted}, {name} has {got}")
    if classes and known and classes != known:
        raise ValueError(f"{op} knows the classes {', '.join(known)}, {name} has {', '.join(classes)}")


def open_pretrained(model: str, name: str) -> Learner:
    """A pretrained network as a :class:`Learner`, in evaluation mode.

    Args:
        model: as for :class:`Learner`.
        name: a network that comes with the package, a folder, a repository, or a file that ``capsfast train`` wrote.

    Raises:
        OSError, ValueError, ModuleNotFoundError, RuntimeError: it can't be read, is of another model, or takes images
            that are not square.
    """
    op = "capsfast.train.open_pretrained"
    return _built(op, name, *read_pretrained(op, model, name))
