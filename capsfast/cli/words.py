"""Translates the options of ``capsfast train``, ``fit`` and so on to Lightning's command line."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Trainer

from ..train import ImageData, Learner

# Options with names of our own; other short names are the last parts of LightningCLI's names.
SHORT = {
    "data": "data.data",
    "model": "model.model",
    "routing": "model.options.routing",
    "epochs": "trainer.max_epochs",
    "test_every": "trainer.val_check_interval",
    "progress": "trainer.enable_progress_bar",
    "resume": "ckpt_path",
}
OWN = ("out", "overwrite", "seed", "checkpoint_every", "patience", "config", "print_config", "ckpt_path", "help")
# Options of Lightning's commands themselves.
LIGHTNINGS = ("trainer", "verbose", "weights_only")
# Options of a model whose values come from the data set.
LINKED: dict[str, Callable[[ImageData], Any]] = {
    "in_channels": lambda images: images.sets.channels,
    "image_size": lambda images: images.sets.image_size,
    "num_classes": lambda images: images.sets.num_classes,
    "class_names": lambda images: images.sets.train.source.classes,
}
HELP = """capsfast train: trains a capsule network, tests it after every epoch, and writes last.ckpt, best.ckpt,
config.yaml, record.json, curve.png and logs/ into its folder. Defaults are in parentheses.

  --data NAME           digits, mnist, fashion-mnist, kmnist, cifar10, svhn, smallnorb, a folder of images or of IDX
                        files, an .npz file, a class path such as my_module.MyImages; multi:NAME (two overlapping
                        images) or affine:NAME (larger canvas; tests are rotated, sheared, scaled)    (digits)
  --download            download the data set if it is missing
  --model NAME          capsnet, efficientcapsnet, deepcaps, ... or a class path                      (capsnet)
  --routing NAME        dynamic, em, ... or a class path                                              (the model's)
  --option NAME=VALUE   option of the model or its routing: conv_channels=64, which is --conv-channels 64
  --epochs N            passes over the data                                                          (10)
  --batch-size N        images per step in each process                                               (128)
  --lr X                learning rate                                                                 (0.001)
  --seed N              seed of weights, order and augmentation                                       (0)
  --out FOLDER          folder for all files; if it holds a run, the next free of out/train-2, ...    (out/train)
  --overwrite           replace the run in that folder
  --resume FILE         continue from this checkpoint, with its model and data, and config.yaml beside it
  --patience N          stop after this many tests without improvement

Any option of capsfast fit works by the last part of its name: --warmup-steps 100 means --model.warmup_steps=100,
--precision bf16-mixed means --trainer.precision. capsfast fit --help lists all; --config FILE reads them."""


# Parameters of the three classes by their full names.
TAKEN = {
    f"{group}.{name}": parameter
    for group, kind in (("model", Learner), ("data", ImageData), ("trainer", Trainer))
    for name, parameter in inspect.signature(kind.__init__).parameters.items()
    if not (group == "model" and name in LINKED)
}


def full_name(word: str) -> str:
    """The name of an option on LightningCLI's command line, without dashes."""
    name = word.replace("-", "_")
    if "." in name or name in (*OWN, *LIGHTNINGS, *SHORT):
        return SHORT.get(name, name)
    groups = (each.partition(".")[0] for each in TAKEN if each.partition(".")[2] == name.rstrip("+"))
    return f"{next(groups, 'model.options')}.{name}"


def _may_stand_alone(name: str) -> bool:
    """Whether an option may stand without a value. Options of a model are not known here, so they may."""
    known = "bool" in str(TAKEN[name].annotation) if name in TAKEN else "." in name
    return known or name == "overwrite"


def spelled_out(command: str, words: Sequence[str]) -> list[str]:
    """Every option by its full name, with its value.

    Raises:
        ValueError: a word is not an option.
    """
    waiting, found = list(words), []
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--"):
            raise ValueError(f"capsfast {command}: options begin with --, got {word!r}")
        typed, mark, value = word.partition("=")
        name = typed.removeprefix("--")
        if not mark:
            if waiting and not waiting[0].startswith("--"):
                value = waiting.pop(0)
            elif name == "print_config":  # stands alone
                found.append(word)
                continue
            else:
                name, value = (name.removeprefix("no-"), "false") if name.startswith("no-") else (name, "true")
                if not _may_stand_alone(full_name(name)):
                    raise ValueError(f"capsfast {command}: {typed} needs a value")
        if name == "option":
            name, mark, value = value.partition("=")
            if not (name and mark):
                raise ValueError(f"capsfast {command}: --option must be NAME=VALUE, got {name!r}")
            name = f"model.options.{name}"
        found.append(f"--{full_name(name)}={value}")
    return found


def by_short_names(text: str) -> str:
    """A message with the short names of its options."""
    for name, full in SHORT.items():
        text = re.sub(rf"--{re.escape(full)}(?![\w.])", f"--{name.replace('_', '-')}", text)
    whole = r"--(?:model\.options|model|data|trainer)\.(\w+)(?![\w.])"
    return re.sub(whole, lambda it: f"--{it[1].replace('_', '-')}", text)


def in_a_line(error: Exception) -> str:
    """Shortens an error of jsonargparse, which lists every type that a value could have, to one line."""
    text = " ".join(str(error).split())
    found = re.fullmatch(r'Parser key "(?P<name>[^"]+)": .*Expected .*(?:Given value|Got value): (?P<value>.*)', text)
    if found is None:
        return text
    path = re.search(r"Problem with given class_path '([^']+)':\s*(.+)", str(error))
    if path is not None:
        return f"--{found['name']}={path[1]}: {path[2]}"
    kinds = re.findall(r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[([^]]*)\])", text)
    wanted = " or ".join(dict.fromkeys(kind or choices for kind, choices in kinds if kind != "NoneType"))
    return f"--{found['name']} must be {wanted or 'of another type'}, got {found['value']!r}"
