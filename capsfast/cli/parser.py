"""jsonargparse's parser with short names, the options of a network, and errors in one line."""

import argparse
import inspect
import re
from difflib import get_close_matches
from typing import Any, NoReturn

from lightning.pytorch.cli import LightningArgumentParser

from ..models import SegCaps
from ..nn import ROUTINGS, RoutedCaps, SlimConvCaps2d
from ..nn.routing.names import options_of, routing_class
from ..storage.dotted import by_path
from ..train.networks import network_class

OPTIONS = "model.options"
# Short names besides the last part of a name.
ALSO = {"trainer.max_epochs": "epochs", "trainer.val_check_interval": "test_every"}
ALSO |= {"trainer.enable_progress_bar": "progress", "ckpt_path": "resume"}
# Parameters of networks and routings that other options decide, or that no option can hold.
LEFT_OUT: set[Any] = {"in_channels", "image_size", "num_classes", "class_names", "device", "dtype", "weight"}
LEFT_OUT |= {"routing", "in_caps", "out_caps", "in_dim", "out_dim"}


class _NameAndValue(argparse.Action):
    """``--option NAME=VALUE`` is ``--model.options.NAME=VALUE``."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        name, mark, value = values.partition("=")
        if not (name and mark):
            parser.error(f"--option must be NAME=VALUE, got {values!r}")
        option = f"--{OPTIONS}.{name}"
        if option not in parser._option_string_actions:
            parser.error(f"unrecognized arguments: --{name.replace('_', '-')}")
        parser._option_string_actions[option](parser, namespace, value, option)


class Parser(LightningArgumentParser):
    """The parser of one command."""

    def add_network(self, op: str, model: str, routing: str | None) -> None:
        """Adds the options of a network and, if the network takes routings, the options of the routing and its layer.

        Raises:
            ValueError, TypeError: no such network, or no such routing.
        """
        network = network_class(op, model)
        kinds: list[Any] = [network]
        if choice := inspect.signature(network).parameters.get("routing"):
            routing, layer = routing or choice.default, SlimConvCaps2d if network is SegCaps else RoutedCaps
            if routing is None:  # other options decide
                kinds += ROUTINGS.values()
            else:
                routing_kind = by_path(f"{op}: routing", routing) if "." in routing else routing
                kinds += filter(inspect.isclass, [routing_class(op, routing_kind)])
            kinds.append(layer)
        for kind in kinds:
            there = {
                action.dest.rpartition(".")[2] for action in self._actions if action.dest.startswith(f"{OPTIONS}.")
            }
            # jsonargparse also follows **options into the code, where it finds other routings.
            taken = inspect.signature(kind).parameters.values()
            own_options = options_of(kind) or [
                parameter.name for parameter in taken if kind is network or parameter.kind is parameter.KEYWORD_ONLY
            ]
            accepted = LightningArgumentParser().add_class_arguments(kind, fail_untyped=False)
            left_out = LEFT_OUT | there | {name for name in accepted if name not in own_options}
            group = self.add_argument_group(f"Options of {kind.__name__}")
            group.add_class_arguments(kind, OPTIONS, as_group=False, skip=left_out, fail_untyped=False)
            if kind is network and choice:
                # Not jsonargparse's type: it would import the class, and a checkpoint holds names.
                what = "dynamic, em, ... or the path of your own class"
                group.add_argument(f"--{OPTIONS}.routing", type=str | None, default=choice.default, help=what)
        for action in (
            action for action in self._actions if action.dest.startswith(f"{OPTIONS}.") and not action.required
        ):
            # The network gets what is given. Its own defaults depend on other options, or on pretrained weights.
            action.help = f"{action.help or ''} Default: {action.default}.".lstrip()
            action.default = argparse.SUPPRESS
        self.add_argument("--option", action=_NameAndValue, default=argparse.SUPPRESS, metavar="NAME=VALUE")

    def add_short_names(self) -> None:
        """Adds for ``--data.batch_size`` the short ``--batch-size``; ``--flip`` and ``--no-flip`` need no value.

        Of two options with one short name the first has it; the network's options come last.
        """
        for action in [action for action in self._actions if hasattr(action, "_typehint")]:
            if "bool" in str(action._typehint):  # type: ignore[attr-defined]
                action.nargs, action.const = "?", True  # type: ignore[misc]
            for name in (action.dest.rpartition(".")[2], ALSO.get(action.dest)):
                short = f"--{name}".replace("_", "-")
                # A configuration file may use any name of an option, and there model and data are groups.
                is_group = action.dest in ("model.model", "data.data")
                if name is None or (short in self._option_string_actions and not is_group):
                    continue
                self._option_string_actions[short] = action
                if not is_group:
                    action.option_strings = [short, *action.option_strings]  # type: ignore[misc]
                if f"--{action.dest}+" in action.option_strings:
                    action.option_strings += (f"{short}+",)  # type: ignore[operator]
                    self._option_string_actions[f"{short}+"] = action
                if action.nargs == "?":
                    no = f"--no-{short[2:]}"
                    never = self._registry_get("action", "store_false")([no], action.dest, default=argparse.SUPPRESS)
                    self._option_string_actions[no] = never

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """jsonargparse's message in one line, with the option that was meant."""
        text = " ".join(message.split())
        if isinstance(ex, argparse.ArgumentError):  # this method raised it
            super().error(text, ex)
        unknown = re.search(r"unrecognized arguments: (--[^\s=]+)|does not accept option '([^']+)'", text)
        if unknown is not None:
            near = get_close_matches(unknown[1] or f"--{unknown[2]}", self._option_string_actions, 1)
            text += f"; did you mean {near[0]}?" if near else "; --help lists all options"
        # A value that is of no type lists every type that it could have.
        wrong = re.fullmatch(r'Parser key "(\S+)": .*Expected .*(?:Given value|Got value): (.*)', text)
        if wrong is not None:
            path = re.search(r"Problem with given class_path '([^']+)':\s*(.+)", message)
            kinds = re.findall(r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[([^]]*)\])", text)
            wanted = dict.fromkeys(kind or choices for kind, choices in kinds if kind != "NoneType")
            text = f"must be {' or '.join(wanted) or 'of another type'}, got {wrong[2]!r}"
            text = f"{self.short(wrong[1])}{f'={path[1]}: {path[2]}' if path else f' {text}'}"
        super().error(text, ex)

    def short(self, name: str) -> str:
        """The shortest option for a full name."""
        options = self._option_string_actions.items()
        return min((option for option, action in options if action.dest == name), key=len, default=f"--{name}")
