"""What ``train``, ``fit``, ``validate`` and ``test`` can know before Lightning is imported, which takes seconds."""

import argparse
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ..storage.files import reading

HELP = """capsfast train: trains a capsule network, tests it after every epoch, and writes last.ckpt, config.yaml,
record.json, curve.png and logs/ into its folder. With images for validation it is validated after every epoch and
tested at the end. Defaults are in parentheses.

  --data NAME           digits, mnist, fashion-mnist, kmnist, cifar10, svhn, smallnorb, a folder of images or of IDX
                        files, a table labels.csv, an .npz file, a class path such as my_module.MyImages; multi:NAME
                        (two overlapping images) or affine:NAME (larger canvas; tests are rotated, sheared, scaled)
                                                                                                      (digits)
  --image-size N        resize pictures to N x N
  --download            download the data set if it is missing
  --model NAME          capsnet, efficientcapsnet, deepcaps, ... or a class path                      (capsnet)
  --routing NAME        dynamic, em, ... or a class path                                              (the model's)
  --pretrained NAME     start from the weights of mnist, ..., a folder, a repository or a checkpoint
  --epochs N            passes over the data                                                          (10)
  --batch-size N        images per step in each process            (128, fewer if an epoch had fewer than eight steps)
  --lr X                learning rate                                                                 (0.001)
  --seed N              seed of weights, order and augmentation                                       (0)
  --out FOLDER          folder for all files; if it holds a run, the next free of out/train-2, ...    (out/train)
  --overwrite           replace the run in that folder
  --resume FILE         continue from this checkpoint, with its model and data, and config.yaml beside it
  --best                also write best.ckpt, the network with the best validation
  --patience N          stop after this many validations without improvement; also write best.ckpt
  --hold-out SHARE      share of the training images for validation                   (0.1 with --best or --patience)

capsfast train --model NAME --routing NAME --help lists all options: of the training, the data, Lightning's trainer,
this network and this routing. --config FILE reads options."""
GROUPS = ("model", "data", "trainer")
READ = {
    "model": ("--model", "--model.model"),
    "routing": ("--routing", "--model.options.routing"),
    "data": ("--data", "--data.data"),
    "resume": ("--resume", "--ckpt_path"),
    "out": ("--out",),
}


def options_in(text: str, folder: Path = Path()) -> dict[str, Any]:
    """The options in a configuration file.

    folder: of the file, which may name another one with the options of the model.

    Raises:
        ValueError: the file, or a group in it, is something else.
        OSError: the other file can't be read.
    """
    content = yaml.safe_load(text)
    groups = {"it": content}
    if isinstance(content, dict):
        if isinstance(content.get("model"), str):
            content["model"] = yaml.safe_load((folder / content["model"]).read_text(encoding="utf-8"))
        groups |= {name: content.get(name) or {} for name in GROUPS}
        model = groups["model"]
        groups["options"] = (model.get("options") if isinstance(model, dict) else None) or {}
    for name, group in groups.items():
        # jsonargparse passes over a group that is a number or a list. A text is the name of a file with the group.
        if name in ("data", "trainer") and isinstance(group, str):
            continue
        if not (isinstance(group, dict) and all(isinstance(word, str) for word in group)):
            raise ValueError(f"{name} must hold names and values, got {reprlib.repr(group)}")
    return dict(content)


def asked(command: str, words: Sequence[str]) -> argparse.Namespace:
    """The words, and the options on which others depend: ``model``, ``routing``, ``data``, ``resume``, ``out``,
    ``config``.

    Raises:
        ValueError: a word that is neither an option nor a value, or a checkpoint that a command lacks.
        FileNotFoundError, OSError: a file that is named and can't be read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for dest, names in READ.items():
        parser.add_argument(*names, dest=dest, nargs="?")
    for names in (("--option",), ("-c", "--config")):
        parser.add_argument(*names, action="append", nargs="?", default=[])
    options, others = parser.parse_known_args(words)
    for before, word in zip(["", *others], others, strict=False):
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            remedy = "" if command in ("train", "fit") else "; --resume FILE names a checkpoint"
            raise ValueError(f"capsfast {command}: options begin with --, got {word!r}{remedy}")
    if options.resume is None and command in ("validate", "test") and not {"-h", "--help"} & {*words}:
        raise ValueError(f"capsfast {command}: a checkpoint is needed; give --resume FILE")
    options.resume = options.resume and os.path.expanduser(options.resume)
    if options.resume is not None and not Path(options.resume).is_file():
        what = "does not exist; training writes last.ckpt into its folder after every epoch"
        if Path(options.resume).is_dir():
            what = "is a folder; name a file in it, such as last.ckpt"
        raise FileNotFoundError(f"capsfast {command}: --resume: {options.resume} {what}")
    folder = (options.data or "").rpartition(":")[2]
    if "/" in folder and not Path(folder).expanduser().exists():
        raise FileNotFoundError(
            f"capsfast {command}: --data: {folder} does not exist; name a folder, an .npz or a .csv file"
        )
    options.words = list(words)
    named = [text.partition("=")[2] for text in options.option if text and text.startswith("routing=")]
    options.routing = options.routing or next(iter(named), None)
    texts, options.config = [file for file in options.config if file], []
    for text in reversed(texts):
        path = Path(text).expanduser()
        if ": " in text:  # jsonargparse also takes the options themselves
            try:
                told = options_in(text)
            except (ValueError, yaml.YAMLError) as error:
                raise ValueError(f"capsfast {command}: --config: {' '.join(str(error).split())}") from None
        else:
            with reading(f"capsfast {command}", path, "options", "config.yaml of a run shows the form"):
                content = path.read_text(encoding="utf-8")
                told = options_in(content, path.parent)
            if path.is_fifo():  # can be read only once
                options.words = [word.replace(text, content) for word in options.words]
            else:
                options.config.append(path)
        model = told.get("model") or {}
        for name, group in (("model", model), ("routing", model.get("options") or {})):
            if getattr(options, name) is None and isinstance(group.get(name), str):
                setattr(options, name, group[name])
    return options
