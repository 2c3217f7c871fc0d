"""The gradient pass: dvotes = sum_t c_t ds_t + db_t V_t, and from it du, dW and dlogits.

V_t is what iteration t scored with; t counts from 0, so V_0 = 0. Program (split, chunk) has the input capsules of its
chunk and the batch tiles of its split. No other program writes du of these, or dW of these input capsules in
partial[split]; groups of outputs and tiles of the batch after the first are added to what it stored before. So there
are no atomics, and no sum depends on the order in which programs run. passes.py adds up the splits of dW in order. A
weight that all input capsules share has a partial dW per program.

A routing pass is one iteration. V is its query, ds the gradient of its first moment, and with x, the votes about a
center, dvotes = c (ds + 2 dsecond x) + db (V - precision x).

The votes and dvotes of an input capsule stay in registers while a loop over the iterations adds to dvotes. V_t and
ds_t are loaded twice, once for the coefficients c_t and db_t and once for the sum, the second time from L1.
"""

import triton
import triton.language as tl

from .arguments import Given, Inputs, Norms, Shape
from .coefficients import agreement, coefficients
from .products import together, votes_to_inputs, votes_to_weights
from .softmax import over_tiles, scaled
from .stores import (
    add_common_votes_gradient,
    add_input_gradient,
    add_inputs_gradient,
    add_weight_gradient,
    store_logits_gradient,
    store_votes_gradient,
)
from .tiles import (
    batch_rows,
    batch_tiles,
    first_tile,
    per_input,
    valid_outputs,
    where_valid,
    zeros,
)
from .vectors import further, load_state, load_vectors, slope, spread, vector_tile
from .votes import input_capsule, pose_tile, votes_about_center, weight_tile


@triton.jit
def uniform_slopes(
    given, ds_ptr, factor, a, x, valid, vectors, first, T: tl.constexpr, S: tl.constexpr
):
    """dvotes of an iteration all of whose couplings are equal. factor: these couplings, [BB]; a: the activation, or
    None."""
    dx = ()
    for n in tl.static_range(T.NT):
        c = where_valid(valid[n], tl.broadcast_to(factor[:, None], [T.BB, T.JT]), 0.0, T.MASKED)
        if a is not None:
            c *= a[:, None]
        ds = load_vectors(ds_ptr, vectors, first + n, T, S)
        dx = dx + (spread(c, T) * slope(ds, x[n], given.dsecond, 2.0, vectors, first + n, T),)
    return dx


@triton.jit
def add_slopes(
    dx, inputs, given, state_ptr, c, db, x, vectors, states, first,
    T: tl.constexpr, R: tl.constexpr, AGREEMENT: tl.constexpr,
):
    """dvotes of an iteration, c (ds + 2 dsecond x) + db (V - precision x), added to all tiles of dx."""
    found = ()
    for n in tl.static_range(T.NT):
        V, ds = load_state(state_ptr, vectors, states, first + n, T, 2 * R, True)
        part = dx[n] + spread(c[n], T) * slope(ds, x[n], given.dsecond, 2.0, vectors, first + n, T, True)
        if AGREEMENT:
            part += spread(db[n], T) * slope(
                V if T.QUERY else None, x[n], inputs.precision, -1.0, vectors, first + n, T, True
            )
        found = found + (part,)
    return found


@triton.jit
def add_tiles(tiles, more, T: tl.constexpr):
    found = ()
    for n in tl.static_range(T.NT):
        found = found + (tiles[n] + more[n],)
    return found


@triton.jit
def weight_products(
    dx, u, dw_ptr, n, k0, stored, T: tl.constexpr, KB: tl.constexpr, BACK_DOT: tl.constexpr, KEEP_DW: tl.constexpr
):
    """Tile n of dW as a tuple of one if KEEP_DW, else stored, and none."""
    dw = ()
    if KEEP_DW or dw_ptr is not None:
        value = votes_to_weights(dx, u, T.JT * T.LANES // 4, BACK_DOT)
        if KEEP_DW:
            dw = (value,)
        else:
            add_weight_gradient(dw_ptr, value, n, k0, stored, T, KB)
    return dw


@triton.jit
def add_products(
    inputs, dx, rows, here, k0, first, du_ptr, dw_ptr, stored,
    T: tl.constexpr, KB: tl.constexpr, BACK_DOT: tl.constexpr, KEEP_DW: tl.constexpr,
):
    """Stores components k from k0 on of du and dW of an input capsule. dx: dvotes, NT tiles. stored: whether there are
    parts of this dW before. If KEEP_DW, dW is returned, NT tiles [N, KB]."""
    ACROSS: tl.constexpr = T.JT * T.LANES // 4  # warps that have the columns of a row
    # du and dW of a tile have their operands in common, but only of few components is there room for both.
    TOGETHER: tl.constexpr = T.K <= KB
    u = here.u if T.K <= KB and KB == T.KP else pose_tile(inputs, rows, here.ok, here.i, k0, T, KB)
    du = tl.zeros([T.BB, KB] if ACROSS <= 1 else [ACROSS, T.BB, KB], tl.float32)
    dw = ()
    if not TOGETHER:
        for n in tl.static_range(T.NT):
            weight_products(dx[n], u, dw_ptr, first + n, k0, stored, T, KB, BACK_DOT, False)
    for n in tl.static_range(T.NT):
        if du_ptr is not None:
            w = weight_tile(here.w, inputs, here.i, first + n, k0, T, KB)
            du = votes_to_inputs(dx[n], w, du, ACROSS, BACK_DOT)
        if TOGETHER:
            dw = dw + weight_products(dx[n], u, dw_ptr, first + n, k0, stored, T, KB, BACK_DOT, KEEP_DW)
    if du_ptr is not None:
        add_input_gradient(du_ptr, together(du, ACROSS), inputs, rows, here, k0, first, T, KB)
    return dw


@triton.jit(
    do_not_specialize=["B", "I", "chunk", "tiles", "groups"], do_not_specialize_on_alignment=["inverse_ptr", "s_ptr"]
)
def gradient_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,
    dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr,
    state_ptr,  # V and ds of every iteration, [B, J, R, 2, D] float32, so that offsets between them are constants
    rows_ptr, norm_ptr, inverse_ptr, delta_ptr, s_ptr,  # [R, ...] of all iterations, see arguments.Norms
    factor_ptr,  # [B] float32 or None, if UNIFORM: the coupling of the first iteration
    dx_ptr,  # out: du [B, I, P K] or dvotes [B, I, J, D], [B, I, 1, D] if COMMON, or None
    dw_ptr,  # out: [splits, I, J, D / P, K] or, if SHARED, [programs, J, D / P, K], or None
    dl_ptr,  # out: [B, I, J] or, if SHARED_LOGITS, [splits, I, J], or None
    dactivation_ptr, drow_ptr,  # out, of a pass: [B, I] float32, or None. drow: of a log-sum-exp that is given
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk, tiles, groups, factor,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, SHARED_LOGITS: tl.constexpr, BACK_DOT: tl.constexpr,
    LEAKY: tl.constexpr, QUERY: tl.constexpr, QUADRATIC: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr,
    START: tl.constexpr, R: tl.constexpr, UNIFORM: tl.constexpr, AGREEMENT: tl.constexpr,
    SHARED: tl.constexpr, COMMON: tl.constexpr,
):
    """START: the first iteration whose coupling depends on the pair (i, j). UNIFORM: the iteration before START has a
    gradient too, and all its couplings are equal. AGREEMENT: gradient="full". COMMON: all outputs have the same votes.
    tiles: batch tiles of a split.
    """
    T: tl.constexpr = Shape(
        J, D, K, P, PP, BB, JT, DP, LANES, KP, NT, VOTES, DOT, WIDE, SHARED_LOGITS, LEAKY, QUERY, QUADRATIC, MASKED,
        NT * JT < J
    )
    xs = (x_b, x_i, x_j, x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = Inputs(
        x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr, precision_ptr, center_ptr, prior_ptr, activation_ptr,
        xs, (w_i, w_j, w_d, w_k), B, I, positions, x_jump
    )
    given = Given(dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr)
    # Splits first: if their number divides that of the multiprocessors, all programs of one have the same V and ds.
    split = tl.program_id(0)
    lo = tl.program_id(1) * chunk
    hi = tl.minimum(lo + chunk, I)
    plane = tl.cast(B, tl.int64) * J
    batch_start = split * tiles
    batch_end = tl.minimum(batch_start + tiles, batch_tiles(inputs, T))
    C: tl.constexpr = D // P
    KB: tl.constexpr = KP if K > 8 else 8  # what a product does not sum over needs no 16
    KEEP_DW: tl.constexpr = SHARED and K <= KB and dw_ptr is not None
    for tile in range(batch_start, batch_end):
        rows = batch_rows(tile, inputs, T)
        vectors = vector_tile(rows, T)
        states = vector_tile(rows, T, 2)
        if factor_ptr is not None:
            each = tl.load(factor_ptr + rows.first + rows.local, mask=rows.inside, other=0.0)
        else:
            each = tl.zeros([BB], tl.float32) + factor
        for group in range(groups):
            first = first_tile(group, T)
            known = ()
            dw = ()
            for n in tl.static_range(NT):
                known = known + (valid_outputs(out_mask_ptr, rows, rows.inside, first + n, T),)
                if KEEP_DW:
                    dw = dw + (tl.zeros([JT * DP, KB], tl.float32),)
            for i32 in range(lo, hi):
                here = input_capsule(inputs, rows, i32, T)
                a = per_input(activation_ptr, rows, here.ok, here.i, inputs) if activation_ptr is not None else None
                x = ()
                valid = ()
                for n in tl.static_range(NT):
                    valid = valid + (known[n] & here.ok[:, None],)
                    x = x + (votes_about_center(inputs, rows, vectors, here, first + n, valid[n], T),)

                dx = zeros(JT * DP, T)
                if UNIFORM:
                    ds_ptr = state_ptr + (2 * START - 1) * D
                    dx = uniform_slopes(given, ds_ptr, each, a, x, valid, vectors, first, T, 2 * R)
                dl = ()
                if dl_ptr is not None:
                    dl = zeros(JT, T)
                for t in range(START, R):
                    at = t * plane
                    state_at = state_ptr + 2 * t * D
                    norms = Norms(
                        rows_ptr + 3 * t * tl.cast(B, tl.int64) * I if MODE == "row_norm" else None,
                        norm_ptr + at if MODE == "in" else None,
                        inverse_ptr + at if MODE == "in" else None,
                        None if delta_ptr is None else delta_ptr + at,
                        None if s_ptr is None else further(s_ptr, at * D, T),
                    )
                    b = ()
                    dc = ()
                    for n in tl.static_range(NT):
                        b_n, dc_n = agreement(
                            inputs, given, norms, state_at, x[n], valid[n], rows, vectors, states, here, first + n,
                            t == R - 1, T, R, MODE
                        )
                        b = b + (b_n,)
                        dc = dc + (dc_n,)
                    c, db = coefficients(b, dc, a, inputs, given, norms, valid, rows, here, known, first, T, MODE)
                    if dactivation_ptr is not None:
                        da = ()
                        for n in tl.static_range(NT):
                            da = da + (where_valid(valid[n], c[n] * dc[n], 0.0, MASKED),)
                        add_inputs_gradient(dactivation_ptr, over_tiles(da, T), inputs, rows, here, first)
                    if drow_ptr is not None:
                        add_inputs_gradient(drow_ptr, -over_tiles(db, T), inputs, rows, here, first)
                    if activation_ptr is not None:
                        c = scaled(c, a, T)
                    dx = add_slopes(dx, inputs, given, state_at, c, db, x, vectors, states, first, T, R, AGREEMENT)
                    if dl_ptr is not None:
                        dl = add_tiles(dl, db, T)

                if dl_ptr is not None:
                    for n in tl.static_range(NT):
                        store_logits_gradient(
                            dl_ptr, dl[n], inputs, rows, here, first + n, split, tile - batch_start, T
                        )
                if COMMON and dx_ptr is not None:
                    add_common_votes_gradient(dx_ptr, dx, inputs, rows, here, first, T)
                elif VOTES and dx_ptr is not None:
                    for n in tl.static_range(NT):
                        store_votes_gradient(dx_ptr, dx[n], inputs, rows, here, first + n, T)
                elif KEEP_DW:
                    dw = add_tiles(dw, add_products(
                        inputs, dx, rows, here, 0, first, dx_ptr, None, 0, T, KB, BACK_DOT, True
                    ), T)
                elif not VOTES:
                    owner = tl.cast(split, tl.int64) * I + here.i
                    stored = tile - batch_start
                    if SHARED:
                        owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                        stored += i32 - lo
                    dw_at = None if dw_ptr is None else dw_ptr + owner * (J * C * K)
                    for k0 in range(0, K, KB):
                        add_products(inputs, dx, rows, here, k0, first, dx_ptr, dw_at, stored, T, KB, BACK_DOT, False)
                    if SHARED and dw_ptr is not None:
                        # The next input capsule adds to this dW, which other threads may have stored.
                        tl.debug_barrier()
            # The next tile or group adds to what other threads may have stored.
            tl.debug_barrier()
            if KEEP_DW:
                owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                for n in tl.static_range(NT):
                    add_weight_gradient(dw_ptr + owner * (J * C * K), dw[n], first + n, 0, tile - batch_start, T, KB)
                tl.debug_barrier()
