"""Windows of an image: a kernel that unfolds them, and a kernel that adds them back. capsfast/windows.py defines both.

An image may have any strides, and one to three axes of places: the axes in front of them have size 1. Windows that are
neighbours along x read neighbours of the image, and write K AREA numbers apart. So an image is read and written in the
order of x, windows in the order of their components, and Triton exchanges the tile through shared memory: lanes follow
the axis of a tile that the compiler knows to be contiguous in memory, or else the last axis.

A program decomposes a place of the window into its axes once for a whole tile. If the tile went over the places too,
every thread would divide for each of its numbers.
"""

import triton
import triton.language as tl


@triton.jit
def components_of(c0, components, s_t, s_k, G: tl.constexpr, BC: tl.constexpr):
    """BC components (type, k) from c0 on: which exist; their offsets in an image, and in a window."""
    o_c = c0 + tl.arange(0, BC)
    o_t, o_k = o_c // G.K, o_c % G.K
    o_image = o_t.to(tl.int64) * s_t + o_k.to(tl.int64) * s_k
    return o_c < components, o_image, o_t.to(tl.int64) * (G.KZ * G.KY * G.KX * G.K) + o_k


@triton.jit(do_not_specialize=["n_z", "n_y", "n_x", "w_z", "w_y", "w_x", "at_z", "at_y", "at_x", "places"])
def unfold_kernel(
    p_image,  # [samples, types, K, n_z, n_y, n_x]
    p_windows,  # [samples w_z w_y w_x, types, KZ KY KX, K], contiguous
    s_b, s_t, s_k, s_z, s_y, s_x,  # strides of the image
    components,  # types K
    n_z, n_y, n_x, w_z, w_y, w_x,
    at_z, at_y, at_x,  # the place of the image where the first window begins, negative in the padding
    places,  # how many places of its windows a program has
    G: tl.constexpr, BC: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """A program has BX windows that are neighbours along x, BC components (type, k), and some places of the window."""
    AREA: tl.constexpr = G.KZ * G.KY * G.KX
    # Programs that run at once write components and places of the same windows.
    pid = tl.program_id(0)
    tiles = tl.cdiv(components, BC)
    c0, pid = pid % tiles * BC, pid // tiles
    parts = tl.cdiv(AREA, places)
    part, pid = pid % parts * places, pid // parts
    tiles = tl.cdiv(w_x, BX)
    x0, row = pid % tiles * BX, pid // tiles  # a row of windows: (b, z, y)
    y, z = row % w_y, row // w_y % w_z
    b = row // w_y // w_z

    m_c, o_image, o_window = components_of(c0, components, s_t, s_k, G, BC)
    o_w = x0 + tl.arange(0, BX)
    m_w = o_w < w_x
    p_out = p_windows + ((row.to(tl.int64) * w_x + o_w) * components * AREA)[:, None] + o_window[None, :]
    p_sample = p_image + b.to(tl.int64) * s_b
    at_z += z * G.SZ
    at_y += y * G.SY
    o_x = at_x + o_w * G.SX
    for place in range(part, tl.minimum(part + places, AREA)):
        i_z = at_z + place // (G.KY * G.KX) * G.DZ
        i_y = at_y + place // G.KX % G.KY * G.DY
        o_i = o_x + place % G.KX * G.DX
        inside = (i_z >= 0) & (i_z < n_z) & (i_y >= 0) & (i_y < n_y)
        m_i = m_w & (o_i >= 0) & (o_i < tl.where(inside, n_x, 0))
        p_row = p_sample + (i_z.to(tl.int64) * s_z + i_y.to(tl.int64) * s_y)
        p_tile = (p_row + o_i.to(tl.int64) * s_x)[None, :] + o_image[:, None]
        b_tile = tl.load(p_tile, mask=m_c[:, None] & m_i[None, :], other=0.0)
        tl.store(p_out + place * G.K, tl.trans(b_tile), mask=m_w[:, None] & m_c[None, :])


@triton.jit
def window_of(place, at, count, STRIDE: tl.constexpr, DILATION: tl.constexpr):
    """The window whose place ``at`` is this place of the image, and whether there is one. place: counted from where the
    first of ``count`` windows begins."""
    start = place - at * DILATION
    return start // STRIDE, (start >= 0) & (start % STRIDE == 0) & (start // STRIDE < count)


# A tile of the image may begin anywhere, so its numbers are loaded one by one. A compiler that knew s_x = 1 would still
# have every lane load four neighbours, in turn.
@triton.jit(do_not_specialize=["s_x", "n_z", "n_y", "n_x", "w_z", "w_y", "w_x", "at_z", "at_y", "at_x"])
def fold_kernel(
    p_image,  # [samples, types, K, n_z, n_y, n_x]: the part of the image that the windows cover
    p_windows,  # [samples w_z w_y w_x, types, KZ KY KX, K], contiguous
    s_b, s_t, s_k, s_z, s_y, s_x,  # strides of the image
    components,  # types K
    n_z, n_y, n_x, w_z, w_y, w_x,
    at_z, at_y, at_x,  # the first place of the image, counted from where the first window begins
    G: tl.constexpr, BC: tl.constexpr, BX: tl.constexpr,
):  # fmt: skip
    """A program has BX places of the image that are neighbours along x, and BC components (type, k). It adds up what
    the windows have there, in the order of the places of a window, and changes the image once."""
    AREA: tl.constexpr = G.KZ * G.KY * G.KX
    WIDE: tl.constexpr = tl.float64 if p_windows.dtype.element_ty == tl.float64 else tl.float32
    pid = tl.program_id(0)
    tiles = tl.cdiv(components, BC)
    c0, pid = pid % tiles * BC, pid // tiles
    tiles = tl.cdiv(n_x, BX)
    x0, row = pid % tiles * BX, pid // tiles
    y, z = row % n_y, row // n_y % n_z
    b = row // n_y // n_z

    m_c, o_image, o_window = components_of(c0, components, s_t, s_k, G, BC)
    o_x = x0 + tl.arange(0, BX)
    m_x = o_x < n_x
    b_sum = tl.zeros((BX, BC), WIDE)
    for i_z in range(G.KZ):
        window_z, exists_z = window_of(at_z + z, i_z, w_z, G.SZ, G.DZ)
        for i_y in range(G.KY):
            window_y, exists_y = window_of(at_y + y, i_y, w_y, G.SY, G.DY)
            if exists_z & exists_y:
                windows = ((b.to(tl.int64) * w_z + window_z) * w_y + window_y) * w_x
                p_row = p_windows + windows * components * AREA + (i_z * G.KY + i_y) * (G.KX * G.K)
                for i_x in range(G.KX):
                    o_w, m_w = window_of(at_x + o_x, i_x, w_x, G.SX, G.DX)
                    o_tile = (o_w.to(tl.int64) * components * AREA)[:, None] + o_window[None, :]
                    m_tile = (m_x & m_w)[:, None] & m_c[None, :]
                    b_sum += tl.load(p_row + i_x * G.K + o_tile, mask=m_tile, other=0.0).to(WIDE)
    p_row = p_image + (b.to(tl.int64) * s_b + z.to(tl.int64) * s_z + y.to(tl.int64) * s_y)
    p_tile = (p_row + o_x.to(tl.int64) * s_x)[None, :] + o_image[:, None]
    m_tile = m_c[:, None] & m_x[None, :]
    tl.store(p_tile, tl.load(p_tile, mask=m_tile, other=0.0) + tl.trans(b_sum), mask=m_tile)
