"""The losses on the activations of the class capsules, by the names of the command line."""

import inspect
from typing import Any

import torch
from torch import Tensor

from .. import checks
from .._imported import by_path
from ..nn import MarginLoss, SpreadLoss
from ..nn._layer import Layer

LOSSES = ("margin", "mse", "spread", "cross-entropy")
# Added to activations before their logarithm. Its inverse squared, which Adam keeps, must be a float32.
LOG_EPS = 1e-12


def multi_hot(labels: Tensor, num_classes: int) -> Tensor:
    """``labels [B]`` or ``[B, n]`` to float32 ``[B, J]``, 1 for each class that is there."""
    there = torch.zeros(len(labels), num_classes, device=labels.device)
    return there.scatter_(1, labels.view(len(labels), -1), 1.0)


class ClassLoss(Layer):
    """A loss on activations ``[B, J]``, a number for each sample.

    * ``margin``: :class:`capsfast.nn.MarginLoss`.
    * ``mse``: the squared distance of the activations from 1 for classes that are there and 0 for others, summed.
    * ``spread``: :class:`capsfast.nn.SpreadLoss`, whose margin grows by the step; images of one class each.
    * ``cross-entropy``: of each activation's share in their sum, which for activations that sum to 1, such as those of
      a softmax, is the negative log likelihood. Two classes have half of the probability each. 1e-12 is added to every
      activation, so that the gradient is at most 1e12 and not 0 where one is tiny. An activation that its own function
      has rounded to 0, as a sigmoid or a squash of very small numbers does, may still get no gradient through that
      function; where ``logs`` are given, they are taken and there is no such limit.

    Args:
        name: one of these, or the path of a class or function of your own: it (or what the class makes, without
            arguments) takes activations ``[B, J]`` and labels ``[B]`` and gives a number for each sample, ``[B]``.
        spread_steps: over which the spread loss's margin grows.

    Raises:
        ValueError: no loss of that name, two classes for the spread loss, or one number for all samples.
    """

    def __init__(self, name: str, spread_steps: int = 10_000) -> None:
        super().__init__()
        op = "capsfast.train.Learner"
        self.own: Any = None
        if "." in name:
            self.own = by_path(f"{op}: loss", name)
            self.own = self.own() if inspect.isclass(self.own) else self.own
        else:
            checks.choice(op, "loss", name, LOSSES)
        self.name = name
        self.spread_steps = spread_steps
        self.margin = MarginLoss(reduction="none")
        self.spread = SpreadLoss(steps=spread_steps, reduction="none")

    @property
    def log_name(self) -> str:
        return self.name.rpartition(".")[2].replace("-", "_")

    def forward(self, activations: Tensor, labels: Tensor, step: int, logs: Tensor | None = None) -> Tensor:
        """``labels [B]`` or ``[B, n]``; step: optimizer steps done; logs: of activations that sum to 1, ``[B, J]``."""
        if self.own is not None:
            own: Tensor = self.own(activations, labels)
            if own.shape != activations.shape[:1]:
                raise ValueError(
                    f"capsfast.train.Learner: loss {self.name} must give a number for each sample, [B], got "
                    f"{checks.shape_of(own)}"
                )
            return own
        if self.name == "spread":
            if labels.dim() != 1:
                raise ValueError("capsfast.train.Learner: loss spread needs one class an image; take margin or mse")
            found: Tensor = self.spread(activations, labels, step)
            return found
        if self.name == "margin":
            found = self.margin(activations, self.targets(activations, labels))
            return found
        present = multi_hot(labels, activations.shape[1])
        a = activations.float()
        if self.name == "mse":
            return (a - present).square().sum(1)
        if logs is None:
            a = a + LOG_EPS
            logs = a.log() - a.sum(1, keepdim=True).log()
        return -(present * logs.float()).sum(1) / present.sum(1)

    def parts(self, activations: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Of the margin loss what classes that are there and classes that are not contribute; else nothing."""
        if self.name != "margin":
            return {}
        present, absent = self.margin.parts(activations, self.targets(activations, labels))
        return {"margin_present": present, "margin_absent": absent}

    def targets(self, activations: Tensor, labels: Tensor) -> Tensor:
        return labels if labels.dim() == 1 else multi_hot(labels, activations.shape[1])
