"""The losses on the activations of the class capsules, by their names on the command line."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ..calls import checks
from ..nn import MarginLoss, SpreadLoss
from ..nn._layer import Layer
from ..storage.dotted import by_path

LOSSES = ("margin", "mse", "spread", "cross-entropy")
# Added to activations before the logarithm. Adam stores squared gradients, so 1 / LOG_EPS squared must fit in float32.
LOG_EPS = 1e-12


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """``labels [B]`` or ``[B, n]`` to float32 ``[B, J]``, 1 for each present class."""
    there = torch.zeros(len(labels), num_classes, device=labels.device)
    return there.scatter_(1, labels[:, None].flatten(1), 1.0)


class ClassLoss(Layer):
    """A loss on activations ``[B, J]``, a number for each sample.

    * ``margin``: :class:`capsfast.nn.MarginLoss`.
    * ``mse``: the squared distance of the activations from 1 for present classes and 0 for absent classes, summed.
    * ``spread``: :class:`capsfast.nn.SpreadLoss`, whose margin grows with the steps; one class per image.
    * ``cross-entropy``: activations are divided by their sum and taken as probabilities. Two present classes have
      probability one half each. 1e-12 is added to every activation, so that the gradient is at most 1e12 and a tiny
      activation still gets one. If a sigmoid or squash rounded an activation to 0, the gradient may still vanish in
      that function. If ``logs`` are given, they are used instead, without this limit.

    Args:
        name: one of these names, or the path of your own function or class (called without arguments). The function or
            instance takes activations ``[B, J]`` and labels ``[B]`` and returns a number for each sample, ``[B]``.
        spread_steps: the margin of the spread loss grows over so many steps.

    Raises:
        ValueError: unknown name, two classes for the spread loss, or a loss that returns one number for all samples.
    """

    def __init__(self, name: str, spread_steps: int = 10_000) -> None:
        super().__init__()
        self.own: Any = None
        if "." in name:
            located = by_path("capsfast.train.Learner: loss", name)
            self.own = located() if inspect.isclass(located) else located
        else:
            checks.choice("capsfast.train.Learner", "loss", name, LOSSES)
        self.name = name
        self.log_name = name.rpartition(".")[2].replace("-", "_")
        self.spread_steps = spread_steps
        self.margin = MarginLoss(reduction="none")
        self.spread = SpreadLoss(steps=spread_steps, reduction="none")

    def forward(self, activations: Tensor, labels: Tensor, step: int, logs: Tensor | None = None) -> Tensor:
        """``labels [B]`` or ``[B, n]``; step: optimizer steps so far; logs: log probabilities ``[B, J]``."""
        op = "capsfast.train.Learner: loss"
        losses: Tensor
        if self.own is not None:
            losses = self.own(activations, labels)
            if losses.shape != activations.shape[:1]:
                got = checks.shape_of(losses)
                raise ValueError(f"{op} {self.name} must give a number for each sample, [B], got {got}")
            return losses
        if self.name == "spread":
            if labels.dim() != 1:
                raise ValueError(f"{op} spread needs one class an image; take margin or mse")
            losses = self.spread(activations, labels, step)
            return losses
        a, present = activations.float(), multi_hot(labels, activations.shape[1])
        if self.name == "margin":
            losses = self.margin(activations, present)
            return losses
        if self.name == "mse":
            return (a - present).square().sum(1)
        if logs is None:
            a = a + LOG_EPS
            logs = a.log() - a.sum(1, keepdim=True).log()
        return -(present * logs.float()).sum(1) / present.sum(1)

    def parts(self, activations: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The contributions of present and absent classes to the margin loss; empty for any other loss."""
        if self.name != "margin":
            return {}
        present, absent = self.margin.parts(activations, multi_hot(labels, activations.shape[1]))
        return {"margin_present": present, "margin_absent": absent}
