"""The base class of all networks: saves them with their options, loads from a folder or the Hugging Face Hub."""

import functools
import importlib
import inspect
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from ..calls import checks
from ..environment.install import in_the_checkout
from ..nn._layer import Layer
from ..storage.files import reading, replacing, write_text

PRETRAINED = Path(__file__).parent / "pretrained"
# huggingface_hub.PyTorchModelHubMixin uses the same file names, so that either reads the other's files.
CONFIG, WEIGHTS = "config.json", "model.safetensors"
MOVED = ("device", "dtype")  # options that are not saved
OF_DATA = {"in_channels", "image_size", "num_classes"}  # options that other images change
AGAIN = "save the network again with save_pretrained"
SAID = 400  # torch names every weight
CARD = """---
library_name: capsfast
tags:
- capsule-networks
---
`capsfast.{network}.from_pretrained("{repo}")` loads this network.
"""


def _library(op: str, name: str) -> ModuleType:
    """A module of the extra ``hub``, imported when it is needed.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ModuleNotFoundError(f"{op} needs {name.partition('.')[0]}; {in_the_checkout('hub')}") from None


@contextmanager
def made_from(op: str, source: str, remedy: str = "use the class and the options that were saved") -> Iterator[None]:
    """For the construction of an object with the options in a file, which may fail anywhere.

    Raises:
        OSError, ModuleNotFoundError, MemoryError, torch.OutOfMemoryError: of the block.
        ValueError: any other error of the block, with the source of the options.
    """
    try:
        yield
    except (OSError, ModuleNotFoundError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{op}: the options in {source} can't be used: {said}; {remedy}") from error


def load_weights(op: str, path: object, network: nn.Module, tensors: Any, *, strict: bool = True) -> None:
    """``network.load_state_dict(tensors)``, for tensors from a file.

    Raises:
        RuntimeError: the file is from another network.
    """
    try:
        network.load_state_dict(tensors, strict=strict)
    except (RuntimeError, TypeError, AttributeError) as error:
        # Without "Error(s) in loading state_dict for Learner:"
        said = " ".join((str(error).partition(":\n")[2] or str(error)).split())
        raise RuntimeError(
            f"{op}: {path} is from another network: {said[:SAID]}{'...' * (len(said) > SAID)}; use the class and the "
            "options that were saved"
        ) from None


def load_fitting(op: str, source: object, network: nn.Module, tensors: Mapping[str, Any]) -> str:
    """Loads the tensors that have the name and the shape of one of the network; its other tensors stay as they are.

    Returns:
        A sentence that names the tensors that were not loaded, or ``""`` if all were.

    Raises:
        RuntimeError: no parameter of the network fits.
    """
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    fitting = {name: tensor for name, tensor in tensors.items() if getattr(tensor, "shape", 0) == shapes.get(name)}
    if not any(name in fitting for name, _ in network.named_parameters()):
        raise RuntimeError(
            f"{op}: no parameter of the network has the name and the shape of one in {source}; use the class and the "
            "sizes that were saved"
        )
    load_weights(op, source, network, fitting, strict=False)
    anew = ", ".join(name for name in shapes if name not in fitting)
    unused = ", ".join(str(name) for name in tensors if name not in shapes)
    parts = [f"drawn anew: {anew}"] * bool(anew) + [f"not used: {unused}"] * bool(unused)
    return f"{op}: {len(fitting)} of {len(shapes)} tensors are from {source}; {'; '.join(parts)}" if parts else ""


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def _recorded(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that stores its arguments."""

    @functools.wraps(init)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        args, kwargs = checks.plain(args), checks.plain(kwargs)  # JSON takes no numbers of NumPy
        vars(self).setdefault("_made_with", (args, kwargs))  # the outermost constructor counts
        init(self, *args, **kwargs)

    return recorded


class Network(Layer):
    """A network that can be saved with the options it was made with.

    ``class_names`` are saved too. They are None unless they are set, or the saved network had them.
    """

    class_names: list[str] | None = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__init__" in vars(cls):
            cls.__init__ = _recorded(cls.__init__)  # type: ignore[method-assign]

    @classmethod
    def _shipped(cls) -> dict[str, Path]:
        """The folders of the networks that come with the package, by their names."""
        prefix = cls._op.rpartition(".")[2].lower() + "-"
        return {path.name.removeprefix(prefix): path for path in sorted(PRETRAINED.glob(f"{prefix}*"))}

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, revision: str | None = None, token: str | None = None, **options: Any
    ) -> Self:
        """A trained network, in evaluation mode. Images are float ``[B, C, H, W]`` in [0, 1].

        ``EfficientCapsNet`` has ``"mnist"``, ``"fashion-mnist"`` and ``"multi-mnist"``, ``CapsNet`` has ``"mnist"``:
        docs/results.md has their records. Any other name is a folder, or a repository of the Hugging Face Hub.

        Args:
            name: one of these names, a folder that :meth:`save_pretrained` wrote, or a repository ``"owner/name"``.
            revision, token: branch, tag or commit of a repository, and an access token to read it.
            options: options of the network that replace the saved ones, such as backend, device and dtype. With
                num_classes, image_size or in_channels, tensors that no longer fit are drawn anew, and a warning names
                them.

        Raises:
            ValueError: no network with this name; a folder or a repository without the two files, with damaged files,
                or with options that the network refuses.
            ModuleNotFoundError: safetensors is not installed, or huggingface_hub for a repository.
            FileNotFoundError: the Hub can't be reached, or has no such repository.
            RuntimeError: the weights are from another network.
        """
        op, text = f"{cls._op}.from_pretrained", os.fspath(name)
        load_file, safe_open = _library(op, "safetensors.torch").load_file, _library(op, "safetensors").safe_open
        folder = cls._shipped().get(text, Path(text).expanduser())
        if not folder.is_dir():
            folder = cls._downloaded(op, text, revision, token)
        missing = [file for file in (CONFIG, WEIGHTS) if not (folder / file).is_file()]
        if missing:
            raise ValueError(f"{op}: {text} has no {' and no '.join(missing)}; save_pretrained writes both")
        with reading(op, folder / CONFIG, "options of a network", AGAIN):
            saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            if not isinstance(saved, dict):
                raise ValueError(f"they must be an object, got {checks.shown(saved)}")
        with reading(op, folder / WEIGHTS, "weights", AGAIN):
            tensors = load_file(folder / WEIGHTS)
            with safe_open(folder / WEIGHTS, "pt") as file:
                names = json.loads((file.metadata() or {}).get("class_names", "null"))
            if not (names is None or (isinstance(names, list) and all(isinstance(text, str) for text in names))):
                raise ValueError(f"class_names must be a list of texts, got {checks.shown(names)}")
        with made_from(op, f"{folder / CONFIG}{' and of this call' * bool(options)}"):
            network = cls(**saved | options)
        if not options.keys() & OF_DATA:
            load_weights(op, folder / WEIGHTS, network, tensors)
        elif said := load_fitting(op, text, network, tensors):
            warnings.warn(said, stacklevel=2)
        if names is not None and options.get("num_classes", len(names)) == len(names):
            network.class_names = names
        return network.eval()

    @classmethod
    def _downloaded(cls, op: str, name: str, revision: str | None, token: str | None) -> Path:
        if name.count("/") != 1 or name[0] in "/.~":
            shipped = "".join(f"{name!r}, " for name in cls._shipped())
            raise ValueError(
                f"{op}: name must be {shipped}a folder, or a repository of the Hugging Face Hub such as 'owner/name', "
                f"got {checks.shown(name)}"
            )
        hub = _library(op, "huggingface_hub")
        try:
            folder = hub.snapshot_download(name, revision=revision, token=token, allow_patterns=[CONFIG, WEIGHTS])
        except (OSError, ValueError) as error:  # ValueError: no name of a repository
            said = str(error).strip().partition("\n")[0]
            raise FileNotFoundError(
                f"{op}: {name} is not a folder, and the Hugging Face Hub does not have it: {said}"
            ) from error
        return Path(folder)

    def _options(self, op: str) -> dict[str, Any]:
        """All options of the network except device and dtype, for JSON.

        Raises:
            ValueError: JSON can't hold an option of the network.
        """
        args, kwargs = vars(self)["_made_with"]
        bound = inspect.signature(type(self)).bind(*args, **kwargs)
        bound.apply_defaults()  # a later version may have other defaults
        taken = bound.signature.parameters
        options: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            options |= value if taken[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
        plain = {name: value for name, value in options.items() if name not in MOVED and _is_plain(value)}
        for name in options.keys() - plain.keys() - {*MOVED}:
            if name not in taken or options[name] is not taken[name].default:
                raise ValueError(
                    f"{op}: {name} must be a number, text, or a sequence of them, got {checks.shown(options[name])}; "
                    "save the state_dict of such a network"
                )
        return plain

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``config.json``, the options of the network, and ``model.safetensors``, its parameters and buffers.

        :meth:`from_pretrained` reads them. A network after ``.half()`` makes a file of half the size, and is float32
        again when it is loaded.

        Raises:
            ValueError: an option is not a plain value, such as your own class.
            ModuleNotFoundError: safetensors is not installed.
            OSError: the folder can't be written to.
        """
        op, path = f"{self._op}.save_pretrained", Path(folder)
        save, options = _library(op, "safetensors.torch").save, self._options(op)
        names = {} if self.class_names is None else {"class_names": json.dumps(self.class_names)}
        with replacing(path / WEIGHTS) as draft:
            draft.write_bytes(save({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, names))
        write_text(path / CONFIG, json.dumps(options, indent=1) + "\n")

    def push_to_hub(
        self, repo: str, *, private: bool | None = None, token: str | None = None, revision: str | None = None
    ) -> str:
        """Uploads the files of :meth:`save_pretrained`, and a README.md if the repository has none.

        Args:
            repo: ``"owner/name"``; created if it does not exist.
            private: whether a new repository is private; None for the owner's default.
            token: an access token to write; None for the token of ``hf auth login``.
            revision: branch of the repository.

        Returns the address of the commit.

        Raises:
            ValueError, ModuleNotFoundError: as :meth:`save_pretrained`; huggingface_hub is not installed.
            OSError: the Hub refuses the upload.
        """
        api = _library(f"{self._op}.push_to_hub", "huggingface_hub").HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            name = api.create_repo(repo, private=private, exist_ok=True).repo_id
            if not api.file_exists(name, "README.md", revision=revision):
                network = self._op.removeprefix("capsfast.")
                write_text(Path(folder) / "README.md", CARD.format(network=network, repo=name))
            return str(api.upload_folder(repo_id=name, folder_path=folder, revision=revision))
