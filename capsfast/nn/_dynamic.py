"""What the routing layers have in common: the options, and the choice of the best outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..options import Options
from . import _arguments
from ._called import Called


def best_only(route: Callable[..., Any], logits: Tensor | None, top_k: int) -> Tensor:
    """``logits [B, I, J]`` that keep for each input capsule the ``top_k`` outputs of largest coupling after one pass.

    ``route`` is a routing function that lacks only logits, num_iterations and return_coupling. The other
    outputs get a logit of -inf. The choice counts as constant.
    """
    with torch.no_grad():
        _, coupling = route(num_iterations=2, logits=logits, return_coupling=True)
        best = coupling.topk(top_k, dim=2).indices
        dropped = torch.ones_like(coupling, dtype=torch.bool).scatter(2, best, torch.zeros_like(best, dtype=torch.bool))
    prior = torch.zeros_like(coupling) if logits is None else logits.expand(coupling.shape)
    return prior.masked_fill(dropped, -torch.inf)


class RoutingLayer(Called):
    """Holds the options of a routing function under their own names."""

    _op: str

    def __init__(self, options: Options, share_batch_logits: bool, top_k: int | None, backend: str | None) -> None:
        super().__init__()
        _arguments.backend(self._op, backend)
        checks.boolean(self._op, "share_batch_logits", share_batch_logits)
        options.check(self._op)
        if top_k is not None:
            _arguments.integer(self._op, "top_k", top_k)
            if share_batch_logits:
                raise ValueError(
                    f"{self._op}: top_k needs share_batch_logits=False, since samples keep different outputs, "
                    f"got top_k={top_k} and share_batch_logits=True"
                )
        self.num_iterations = options.num_iterations
        self.softmax = options.softmax
        self.gradient = options.gradient
        self.leaky = options.leaky
        self.squash = options.squash
        self.eps = options.eps
        self.squash_last = options.squash_last
        self.share_batch_logits = share_batch_logits
        self.top_k = top_k
        self.backend = backend

    def _route(
        self,
        function: Callable[..., Any],
        *tensors: Tensor,
        logits: Tensor | None,
        return_coupling: bool,
        **parameters: Tensor | None,
    ) -> Any:
        route = partial(
            function,
            *tensors,
            **parameters,
            softmax=self.softmax,
            gradient=self.gradient,
            leaky=self.leaky,
            squash=self.squash,
            eps=self.eps,
            squash_last=self.squash_last,
            backend=self.backend,
        )
        if self.top_k is not None:
            logits = best_only(route, logits, self.top_k)
        return route(num_iterations=self.num_iterations, logits=logits, return_coupling=return_coupling)

    def extra_repr(self) -> str:
        return f"num_iterations={self.num_iterations}" + _arguments.changed(
            self,
            softmax="out",
            gradient="full",
            leaky=False,
            squash="paper",
            eps=1e-8,
            squash_last=True,
            share_batch_logits=False,
            top_k=None,
            backend=None,
        )
