"""TorchScript, which torch has deprecated, for those who still have archives of it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import checks
from ..nn._layer import Layer
from ..nn.dynamic_routing import DynamicRouting
from ..options import Options
from ..precision import tf32_allowed

# What a call of the layer runs, and the op stands for.
REPLACED = ("__call__", "forward", "_route", "_weights")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _check_plain(op: str, layer: object) -> None:
    """That a call of the layer does no more than the op."""
    if not isinstance(layer, DynamicRouting):
        raise TypeError(f"{op}: layer must be a capsfast.DynamicRouting, got {type(layer).__name__}")
    kind = type(layer).__name__
    if parametrize.is_parametrized(layer):
        names = ", ".join(layer.parametrizations)  # type: ignore[union-attr, arg-type]
        raise ValueError(
            f"{op}: layer must be without parametrizations, got {kind} with one of {names}; call "
            f"torch.nn.utils.parametrize.remove_parametrizations first, or use torch.jit.trace"
        )
    for name in HOOKS:
        if getattr(layer, name):
            raise ValueError(
                f"{op}: layer must be without hooks, which the copy would not run, got {kind} with "
                f"{name.strip('_').replace('_', ' ')}; remove them, or use torch.jit.trace"
            )
    for name in REPLACED:
        if name in vars(layer) or getattr(type(layer), name) is not getattr(DynamicRouting, name):
            raise TypeError(
                f"{op}: layer must have the {name} of capsfast.DynamicRouting, got {kind} with one of its own; "
                f"torch.jit.trace serves the layer"
            )


class ScriptableRouting(nn.Module):
    """The routing of a :class:`capsfast.DynamicRouting` as code that ``torch.jit.script`` compiles.

    Parameters: those of the layer, the same objects under the same names.

    Args:
        layer: without rank, groups, top_k and share_batch_logits; its backend "cpp", "cuda" or None.

    Shapes: ``u [B, in_caps, in_dim]`` to ``v [B, out_caps, out_dim]``; logits, mask and out_mask as in
    :func:`capsfast.dynamic_routing`.

    Raises:
        TypeError: another layer, or one with a forward or a routing of its own.
        ValueError: an option that the op alone does not serve; hooks or parametrizations.
    """

    W: nn.Parameter
    logits: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layer: DynamicRouting) -> None:
        super().__init__()
        op = "capsfast.export.ScriptableRouting"
        _check_plain(op, layer)
        unserved = {"rank": None, "groups": 1, "top_k": None, "share_batch_logits": False}
        for name, wanted in unserved.items():
            if getattr(layer, name) != wanted:
                got = checks.shown(getattr(layer, name))
                raise ValueError(f"{op}: {name} must be {wanted}, got {got}; torch.jit.trace serves the layer")
        if layer.backend not in (None, "cpp", "cuda"):
            raise ValueError(f"{op}: backend must be None, 'cpp' or 'cuda', got {checks.shown(layer.backend)}")
        for name in ("W", "logits", "bias"):
            self.register_parameter(name, getattr(layer, name))
        self.positions = layer.positions if layer.W is not None and layer.W.shape[0] > 1 else 1
        options = Options(**{name: getattr(layer, name) for name in Options._fields}).of_op()
        self.num_iterations, self.softmax, self.gradient, self.leaky, self.squash, self.eps = options
        self.tf32 = tf32_allowed()
        self.train(layer.training)

    def forward(
        self, u: Tensor, logits: Tensor | None = None, mask: Tensor | None = None, out_mask: Tensor | None = None
    ) -> Tensor:
        weight: Tensor = self.W
        if self.positions > 1:
            weight = weight.unsqueeze(1).expand(-1, self.positions, -1, -1, -1).flatten(0, 1)
        prior: Tensor | None = self.logits
        if logits is not None:
            prior = logits if prior is None else prior + logits
        v, _, _, _ = torch.ops.capsfast.dynamic_routing(
            u,
            weight,
            prior,
            self.bias,
            mask,
            out_mask,
            self.num_iterations,
            self.softmax,
            self.gradient,
            self.leaky,
            self.squash,
            self.eps,
            self.tf32,
            False,
        )
        return v  # type: ignore[no-any-return]


def scriptable(model: nn.Module) -> nn.Module:
    """A copy of the model for ``torch.jit.script``, in which every DynamicRouting is a :class:`ScriptableRouting`.

    The copy has the parameters of the model, not copies of them; the model stays as it is. Other layers of capsfast are
    for ``torch.jit.trace``, whose result may be part of the model.

    Raises:
        TypeError: the model holds another layer, loss or network of capsfast.
        TypeError, ValueError: as ScriptableRouting.
    """
    return _copy(model, {})


def _copy(module: nn.Module, made: dict[int, nn.Module]) -> nn.Module:
    """made: the copies by the id of what they were made of, as a module may be in several places."""
    if id(module) not in made:
        if isinstance(module, DynamicRouting):
            made[id(module)] = ScriptableRouting(module)
        elif isinstance(module, Layer):
            raise TypeError(
                f"capsfast.export.scriptable: {type(module).__name__} cannot be scripted, with all that it holds; put "
                f"torch.jit.trace of it in its place, or trace the whole model"
            )
        else:
            made[id(module)] = copied = copy.copy(module)
            children: dict[str, Any] = {
                name: None if child is None else _copy(child, made) for name, child in module._modules.items()
            }
            copied._modules = children
    return made[id(module)]
