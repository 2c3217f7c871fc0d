"""Tuples that kernels pass to their functions as one argument. tiles.py has the symbols.

Triton's cache of compiled kernels looks at T and at the text of kernels and their functions, not at these classes.
Whoever adds or moves a field has to change the calls, which are positional; so the text changes too.

Every kernel makes KernelInputs itself, in the same lines: in Triton 3.6 a function cannot return a tuple with None.
"""

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """T, what a kernel is compiled for: the layer, how tiles cut it (config.Tiles), and flags.

    VOTES: votes are given. DOT: how votes are computed, see products.py. LEAKY: of the softmax. QUERY: there is a
    query. QUADRATIC: votes are used for more than the score with the query and the first moment. MASKED: kernels ask
    which pairs are valid, see where_valid() in tiles.py. SECTIONED: there is more than one section of outputs. x_j,
    x_d, w_j, w_d, w_k: strides, x_d over components of u or of votes.
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
    SECTIONED: Any
    x_j: Any
    x_d: Any
    w_j: Any
    w_d: Any
    w_k: Any


class Vectors(NamedTuple):
    """L, what a step between passes is compiled for: J outputs; D numbers per output, in P rows of a pose matrix; ROWS
    of a strip, see strips.py."""

    J: Any
    D: Any
    P: Any
    ROWS: Any


class Geometry(NamedTuple):
    """G, what the kernels of windows.py are compiled for: K components of a capsule; along the axes z, y, x the size of
    a window, the distance of windows, and the distance of the places of a window."""

    K: Any
    KZ: Any
    KY: Any
    KX: Any
    SZ: Any
    SY: Any
    SX: Any
    DZ: Any
    DY: Any
    DX: Any


class KernelInputs(NamedTuple):
    """Pointers that every kernel has, strides, and sizes that are not compiled in.

    xs: strides of u (b, i, -, k) or of votes (b, i, j, d); with positions the first stride is over positions. ws:
    strides of the weight (i, j, d, k). jump: the stride of x over b minus the strides over all positions. together: how
    many input capsules are taken as one.
    """

    p_x: Any
    p_w: Any
    p_logits: Any
    p_mask: Any
    p_out_mask: Any
    p_precision: Any  # of a pass, or None: vectors, see strips.py
    p_center: Any  # vectors
    p_prior: Any  # [B, J]
    p_activation: Any  # [B, I]
    xs: Any
    ws: Any
    B: Any
    I: Any
    positions: Any
    jump: Any
    together: Any = 1


class OutputGradients(NamedTuple):
    """Gradients of outputs, contiguous and float32 except dcoupling: pointers in kernels, tensors on the host."""

    dcoupling: Any = None  # [B, I, J]
    dmass: Any = None  # of a pass, as all that follow: [B, J]
    dsecond: Any = None  # vectors, see strips.py
    dlse: Any = None  # [B, I]; [B, J] for MODE "in"


class Norms(NamedTuple):
    """What a softmax takes from the passes before it, float32: pointers in kernels, tensors on the host. In the
    backward of several iterations the tensors have an axis of iterations in front."""

    # [B, I, 4], for MODE "row_norm": maximum, 1 / sum, sum_j c dc, unused; or a log-sum-exp, 1, 0, unused
    rows: Any = None
    maximum: Any = None  # [B, J], for MODE "in", as all that follow
    inverse: Any = None  # [B, J]: 1 / sum
    delta: Any = None  # [B, J]: sum_i c dc, without s . ds + s^2 . dsecond if there is s
    s: Any = None  # vectors of all iterations, see strips.py: sum_i c x


class Rows(NamedTuple):
    """The samples of a tile. start: the first sample. o_b: the sample of every row, counted from start, [BB]. count:
    number of samples from start on. p_x: the address to which strides are added. m_rows: rows that exist. m_once: the
    first row of every sample."""

    start: Any
    o_b: Any
    count: Any
    p_x: Any
    m_rows: Any
    m_once: Any


class Capsule(NamedTuple):
    """An input capsule. i: its number, 64 bits; m_rows: rows that have the capsule, [BB]; b_u: the first KP components
    of its poses, [BB, KP], unless votes are given."""

    i: Any
    m_rows: Any
    b_u: Any
    p_w: Any
