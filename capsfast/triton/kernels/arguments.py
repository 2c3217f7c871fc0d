"""What goes through the kernels together: one argument of their functions each. tiles.py has the symbols.

Triton's cache of compiled kernels knows the text of kernels and their functions, not of these classes. A field that is
added or moved has to change the calls, which are positional, and so changes that text.

Every kernel makes its own, in the same lines: with Triton 3.6 a function cannot return a tuple with None in it.
"""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """T, what a kernel is compiled for.

    The layer, how tiles cut it (config.Tiles), and whether: VOTES are given; the softmax is LEAKY; there is a QUERY;
    something is QUADRATIC beyond the score with it and the first moment; pairs may be MASKED; there is more than one
    group of outputs (GROUPED). DOT: how votes are computed, see products.py.
    """

    J: Any
    D: Any
    K: Any
    P: Any
    PP: Any
    BB: Any
    JT: Any
    DP: Any
    LANES: Any
    KP: Any
    NT: Any
    VOTES: Any
    DOT: Any
    SHARED_LOGITS: Any
    LEAKY: Any
    QUERY: Any
    QUADRATIC: Any
    MASKED: Any
    GROUPED: Any


class Inputs(NamedTuple):
    """Pointers that every kernel has, strides, and sizes that it is not compiled for.

    xs: strides of u (b, i, -, k) or of votes (b, i, j, d), the first over positions if there are any. ws: of the weight
    (i, j, d, k). jump: what the address of x gains from a b to the next, beyond strides over positions.
    """

    x: Any
    w: Any
    logits: Any
    mask: Any
    out_mask: Any
    precision: Any  # of a pass, or None: float32 [B, J, D]
    center: Any  # [B, J, D]
    prior: Any  # [B, J]
    activation: Any  # [B, I]
    xs: Any
    ws: Any
    B: Any
    I: Any
    positions: Any
    jump: Any


class Given(NamedTuple):
    """Pointers to gradients of outputs, float32 but for dcoupling, each of which may be None."""

    dcoupling: Any  # [B, I, J]
    dmass: Any  # of a pass, as all that follow: [B, J]
    dsecond: Any  # [B, J, D]
    dlse: Any  # [B, I]; [B, J] for MODE "in"


class Norms(NamedTuple):
    """What a softmax takes over the passes before it: pointers, or on the host tensors, float32. In a gradient of
    several iterations they have an axis for these in front."""

    # [B, I, 4], for MODE "row_norm": maximum, 1 / sum, sum_j c dc and one that is not used; or a log-sum-exp, 1 and 0
    rows: Any = None
    maximum: Any = None  # [B, J], for MODE "in", as all that follow
    inverse: Any = None  # [B, J]: 1 / sum
    delta: Any = None  # [B, J]: sum_i c dc, without s . ds + s^2 . dsecond if there is s
    s: Any = None  # [B, J, D]: sum_i c x


class Rows(NamedTuple):
    """The samples of a tile: the number of the first, of every row from there on [BB], and how many there are from
    there on. x: the pointer from which strides lead to them. inside: which rows exist; once: of these the first of
    every sample."""

    first: Any
    local: Any
    count: Any
    x: Any
    inside: Any
    once: Any


class Capsule(NamedTuple):
    """An input capsule: its number in 64 bits, which samples have it [BB], the first KP components of its
    poses [BB, KP] unless votes are given, and the pointer to the weights."""

    i: Any
    ok: Any
    u: Any
    w: Any
