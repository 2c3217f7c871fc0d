"""Imports torchvision when it is needed."""

import importlib
from types import ModuleType

import torch

from ..environment.install import in_the_checkout


def torchvision(module: str) -> ModuleType:
    """A module of torchvision, such as ``datasets``.

    Raises:
        ModuleNotFoundError: torchvision is not installed, or was built for another torch.
    """
    try:
        return importlib.import_module(f"torchvision.{module}")
    except ImportError:
        raise ModuleNotFoundError(f"capsfast.data: images need torchvision; {in_the_checkout('train')}") from None
    except RuntimeError as error:  # "operator torchvision::nms does not exist"
        raise ModuleNotFoundError(
            f"capsfast.data: this torchvision was not built for torch {torch.__version__}; install both from one "
            f"index: {error}"
        ) from None
