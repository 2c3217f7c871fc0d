"""What all layers, losses and networks derive from."""

from typing import Any

import torch
from torch import nn
from torch.overrides import has_torch_function


class Layer(nn.Module):
    """A module that torch.fx keeps as one node where another module calls it, whatever its forward looks at.

    Of a module that is itself traced the forward runs on proxies, as far as it can.
    """

    # Not in forward: hooks are to run when the node does.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if has_torch_function(args) or (kwargs and has_torch_function(tuple(kwargs.values()))):
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.fx.Proxy):
                    tracer: Any = value.tracer
                    return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return super().__call__(*args, **kwargs)

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script asks for before it compiles."""
        raise TypeError(
            f"capsfast: torch.jit.script cannot compile {type(self).__name__}; script "
            f"capsfast.export.scriptable(model), where every DynamicRouting is replaced, or use torch.jit.trace"
        )
