"""The axes of all arguments but u, weight and votes, one letter for each axis."""

from torch import Tensor

AXES = {
    **dict.fromkeys(("query", "precision", "center"), "BJD"),
    **dict.fromkeys(("prior", "out_mask"), "BJ"),
    **dict.fromkeys(("activation", "lse", "mask"), "BI"),
    "logits": "BIJ",
    "bias": "JD",
}


def axes_of(name: str, value: object) -> str:
    """The axes of an argument, without the axes of positions."""
    per_sample = isinstance(value, Tensor) and value.dim() > 2
    return "IJ" if name == "logits" and not per_sample else AXES[name]
