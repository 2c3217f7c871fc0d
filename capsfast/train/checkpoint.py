"""Checkpoints: written whole, and read back into the network and the data it was trained on."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from ..data.catalogue import check_data_dir
from ..files import replacing
from .images import ImageData
from .learner import Learner
from .learners import make_learner


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's writer, except that the file before stays until the new one is complete.

    Lightning's own draft lies in the folder for temporary files, from where another disk is reached by copying alone.

    newest: the last file written, and the step that it holds. on_written: hears of every file.
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


def read_checkpoint(path: Path | str) -> dict[str, Any]:
    """The content of a checkpoint of this package, tensors on the CPU; no code in it is run.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a checkpoint, or one of something else.
    """
    op = f"capsfast.train.read_checkpoint: {path}"
    if not Path(path).is_file():
        raise FileNotFoundError(f"{op} does not exist; training writes last.ckpt into its folder after every epoch")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{op} can't be read as a checkpoint: {str(error).splitlines()[0]}") from None
    needed = {"state_dict", Learner.CHECKPOINT_HYPER_PARAMS_KEY, ImageData.CHECKPOINT_HYPER_PARAMS_KEY}
    if not isinstance(content, dict) or not needed <= content.keys():
        raise ValueError(f"{op} is not a checkpoint that capsfast train wrote")
    return content


def open_checkpoint(
    path: Path | str, *, data: str | None = None, data_dir: str | None = None
) -> tuple[Learner, ImageData]:
    """The trained network, in evaluation mode, and its data, read.

    Args:
        path: a file that ``capsfast train`` wrote.
        data, data_dir: other data than it was trained on; sizes and classes must fit.

    Raises:
        FileNotFoundError, ValueError: as :func:`read_checkpoint` and :func:`capsfast.data.open_sets`; data
            that does not fit the network; a ``data_dir`` for data that has none.
    """
    content = read_checkpoint(path)
    learner = make_learner(**content[Learner.CHECKPOINT_HYPER_PARAMS_KEY])
    learner.load_state_dict(content["state_dict"])
    learner.eval()
    options = dict(content[ImageData.CHECKPOINT_HYPER_PARAMS_KEY])
    if data is not None:
        # Its own size and no augmentation: the sizes must fit by themselves.
        options = {name: options[name] for name in ("data_dir", "batch_size", "seed", "workers")} | {"data": data}
    if data_dir is not None:
        check_data_dir("capsfast.train.open_checkpoint", options["data"], data_dir)
        options["data_dir"] = data_dir
    images = ImageData(**options)
    images.setup()
    sets, wanted = images.sets, learner.sizes
    got = {"in_channels": sets.channels, "image_size": sets.image_size, "num_classes": sets.num_classes}
    if got != wanted:
        raise ValueError(f"capsfast.train.open_checkpoint: {path} needs {wanted}, {options['data']} has {got}")
    return learner, images
