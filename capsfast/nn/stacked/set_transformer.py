"""Encodes a set, regardless of the order of its members."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Unpack

from .._arguments import FactoryKwargs
from .._layer import Layer


class SetTransformer(Layer):
    """Self-attention between the members of a set, then attention of learned queries to them (Lee et al. 2019).

    The layers are torch's own (SAB: ``TransformerEncoderLayer``, PMA: ``MultiheadAttention`` and a residual layer).

    Args:
        in_dim: size of a member.
        out_dim, num_outputs: size and number of the encodings.
        dim: width of the layers.
        num_layers, num_heads: layers and heads of the self-attention.
        device, dtype: device and dtype of the parameters.

    Shapes: ``members [B, M, in_dim]``, ``presence [B, M]`` to ``[B, num_outputs, out_dim]``. A member is attended to in
    proportion to its presence, in (0, 1].
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        num_outputs: int,
        *,
        dim: int = 16,
        num_layers: int = 3,
        num_heads: int = 1,
        **factory_kwargs: Unpack[FactoryKwargs],
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{self._op}: num_heads must divide dim={dim}, got {num_heads}")
        self.embed = nn.Linear(in_dim, dim, **factory_kwargs)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, 2 * dim, dropout=0.0, batch_first=True, **factory_kwargs)
            for _ in range(num_layers)
        )
        self.expand = nn.Linear(dim, out_dim, **factory_kwargs)
        self.queries = nn.Parameter(torch.empty(num_outputs, out_dim, **factory_kwargs))
        self.attention = nn.MultiheadAttention(out_dim, num_heads, batch_first=True, **factory_kwargs)
        self.norm = nn.LayerNorm(out_dim, **factory_kwargs)
        self.out = nn.Linear(out_dim, out_dim, **factory_kwargs)
        self._initialise()

    def _initialise(self) -> None:
        nn.init.xavier_uniform_(self.queries)

    def forward(self, members: Tensor, presence: Tensor) -> Tensor:
        B = members.shape[0]
        if B == 0:  # torch's attention takes no empty batch
            members, presence = F.pad(members, (0, 0, 0, 0, 0, 1)), F.pad(presence, (0, 0, 0, 1), value=1.0)
        # Adding the logarithm to the attention's logits multiplies its weights.
        weight = presence.clamp_min(torch.finfo(presence.dtype).tiny).log()
        x = self.embed(members)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=weight)
        x = self.expand(x)
        queries = self.queries.expand(x.shape[0], -1, -1)
        attended, _ = self.attention(queries, x, x, key_padding_mask=weight, need_weights=False)
        y: Tensor = self.norm(queries + attended)
        out: Tensor = self.out(y)
        return (y + out.relu())[:B]
