"""The gradient pass: dvotes = sum_t c_t ds_t + db_t V_t, and from it du, dW and dlogits.

V_t is what iteration t scored with; t counts from 0, so V_0 = 0. Program (split, chunk) has the input capsules of its
chunk and the batch tiles of its split. No other program writes du of these, or dW of these input capsules in
partial[split]; groups of outputs and tiles of the batch after the first are added to what it stored before. So there
are no atomics, and no sum depends on the order in which programs run. passes.py adds up the splits of dW in order. A
weight that all input capsules share has a partial dW per program.

A routing pass is one iteration. V is its query, ds the gradient of its first moment, and with x, the votes about a
center, dvotes = c (ds + 2 dsecond x) + db (V - precision x).

The votes and dvotes of an input capsule stay in registers from one iteration to the next. If HELD, V and ds of all
iterations do too, from one input capsule to the next, for which only few outputs at a time have room; what couples all
outputs comes from the rows that accumulate_gradient or row_norm stored. Else V_t and ds_t are loaded for every input
capsule, and for more than one tile twice, once for the coefficients c_t and db_t and once for the sum.
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
from .vectors import add_scaled, further, load_state, load_vectors, no_terms, slope, vector_tile, whole
from .votes import input_capsule, pose_tile, votes_about_center, weight_tile


@triton.jit
def uniform_slopes(dxs, given, ds, factor, a, x, valid, vectors, first, T: tl.constexpr, PARTED: tl.constexpr):
    """dvotes of an iteration all of whose couplings are equal, added to dxs. factor: these couplings, [BB]; a: the
    activation, or None."""
    found = ()
    for n in tl.static_range(T.NT):
        c = where_valid(valid[n], tl.broadcast_to(factor[:, None], [T.BB, T.JT]), 0.0, T.MASKED)
        if a is not None:
            c *= a[:, None]
        curved = slope(ds[n], x[n], given.dsecond, 2.0, vectors, first + n, T)
        found = found + (add_scaled(dxs[n], c, curved, T, PARTED),)
    return found


@triton.jit
def tiles_of(ptr, vectors, first, T: tl.constexpr, S: tl.constexpr):
    """NT tiles of load_vectors()."""
    found = ()
    for n in tl.static_range(T.NT):
        found = found + (load_vectors(ptr, vectors, first + n, T, S),)
    return found


@triton.jit
def states_of(state_ptr, vectors, states, first, T: tl.constexpr, S: tl.constexpr, AGAIN: tl.constexpr = False):
    """V and ds of an iteration, NT tiles each."""
    V = ()
    ds = ()
    for n in tl.static_range(T.NT):
        V_n, ds_n = load_state(state_ptr, vectors, states, first + n, T, S, AGAIN)
        V = V + (V_n,)
        ds = ds + (ds_n,)
    return V, ds


@triton.jit
def add_slopes(
    dxs, inputs, given, V, ds, c, db, x, vectors, first,
    T: tl.constexpr, AGREEMENT: tl.constexpr, PARTED: tl.constexpr,
):
    """dvotes of an iteration, c (ds + 2 dsecond x) + db (V - precision x), added to all tiles of dxs."""
    AGAIN: tl.constexpr = T.NT > 1
    found = ()
    for n in tl.static_range(T.NT):
        curved = slope(ds[n], x[n], given.dsecond, 2.0, vectors, first + n, T, AGAIN)
        each = add_scaled(dxs[n], c[n], curved, T, PARTED)
        if AGREEMENT:
            query = V[n] if T.QUERY else None
            curved = slope(query, x[n], inputs.precision, -1.0, vectors, first + n, T, AGAIN)
            each = add_scaled(each, db[n], curved, T, PARTED)
        found = found + (each,)
    return found


@triton.jit
def add_iteration(
    dxs, dl, inputs, given, norms, state_ptr, held, dactivation_ptr, drow_ptr,
    a, x, valid, rows, vectors, states, here, known, first, t,
    T: tl.constexpr, R: tl.constexpr, MODE: tl.constexpr, AGREEMENT: tl.constexpr, PARTED: tl.constexpr,
):
    """What iteration t adds to dvotes and, if there are any, dlogits. norms: of all iterations. held: V and ds of this
    one, or None."""
    at = t * tl.cast(inputs.B, tl.int64) * T.J
    norms = Norms(
        norms.rows + 4 * t * tl.cast(inputs.B, tl.int64) * inputs.I if MODE == "row_norm" else None,
        norms.maximum + at if MODE == "in" else None,
        norms.inverse + at if MODE == "in" else None,
        None if norms.delta is None else norms.delta + at,
        None if norms.s is None else further(norms.s, at * T.D, T),
    )
    state_at = state_ptr + 2 * t * T.D
    V, ds = states_of(state_at, vectors, states, first, T, 2 * R) if held is None else held
    b = ()
    dc = ()
    for n in tl.static_range(T.NT):
        b_n, dc_n = agreement(
            inputs, given, norms, V[n], ds[n], x[n], valid[n], rows, vectors, here, first + n, t == R - 1, T, MODE
        )
        b = b + (b_n,)
        dc = dc + (dc_n,)
    c, db, _ = coefficients(b, dc, a, inputs, given, norms, valid, rows, here, known, first, T, MODE)
    if dactivation_ptr is not None:
        da = ()
        for n in tl.static_range(T.NT):
            da = da + (where_valid(valid[n], c[n] * dc[n], 0.0, T.MASKED),)
        add_inputs_gradient(dactivation_ptr, over_tiles(da, T), inputs, rows, here, first)
    if drow_ptr is not None:
        add_inputs_gradient(drow_ptr, -over_tiles(db, T), inputs, rows, here, first)
    if a is not None:
        c = scaled(c, a, T)
    if held is None and T.NT > 1:
        V, ds = states_of(state_at, vectors, states, first, T, 2 * R, True)
    dxs = add_slopes(dxs, inputs, given, V, ds, c, db, x, vectors, first, T, AGREEMENT, PARTED)
    if len(dl) > 0:
        dl = add_tiles(dl, db, T)
    return dxs, dl


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
    inputs, dx, rows, here, k0, first, last, du_ptr, room_ptr, dw_ptr, stored,
    T: tl.constexpr, KB: tl.constexpr, BACK_DOT: tl.constexpr, AHEAD: tl.constexpr, PARTED: tl.constexpr,
    KEEP_DW: tl.constexpr,
):
    """Stores components k from k0 on of du and dW of an input capsule. dx: dvotes, NT tiles. stored: whether there are
    parts of this dW before. If KEEP_DW, dW is returned, NT tiles [N, KB]."""
    ACROSS: tl.constexpr = T.JT * T.LANES // 4  # warps that have the columns of a row
    # du and dW of a tile have their operands in common, but only of few components is there room for both.
    TOGETHER: tl.constexpr = T.K <= KB
    u = here.u
    if AHEAD or T.K > KB or KB != T.KP:
        u = pose_tile(inputs, rows, here.ok, here.i, k0, T, KB, AHEAD)
    du = tl.zeros([T.BB, KB] if ACROSS <= 1 else [ACROSS, T.BB, KB], tl.float32)
    dw = ()
    if not TOGETHER:
        for n in tl.static_range(T.NT):
            weight_products(dx[n], u, dw_ptr, first + n, k0, stored, T, KB, BACK_DOT, False)
    for n in tl.static_range(T.NT):
        if du_ptr is not None:
            w = weight_tile(here.w, inputs, here.i, first + n, k0, T, KB, AHEAD)
            du = votes_to_inputs(dx[n], w, du, ACROSS, BACK_DOT, PARTED)
        if TOGETHER:
            dw = dw + weight_products(dx[n], u, dw_ptr, first + n, k0, stored, T, KB, BACK_DOT, KEEP_DW)
    if du_ptr is not None:
        du = together(du, ACROSS)
        add_input_gradient(du_ptr, room_ptr, du, inputs, rows, here, k0, first, last, T, KB)
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
    room_ptr,  # float32, room for dx where it is a sum over groups of outputs and not float32, or None
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
    SHARED: tl.constexpr, COMMON: tl.constexpr, HELD: tl.constexpr, AHEAD: tl.constexpr,
):
    """START: the first iteration whose coupling depends on the pair (i, j). UNIFORM: the iteration before START has a
    gradient too, and all its couplings are equal. AGREEMENT: gradient="full". COMMON: all outputs have the same votes.
    HELD: V and ds stay in registers, see above. AHEAD: loads are pipelined. tiles: batch tiles of a split.
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
    norms = Norms(rows_ptr, norm_ptr, inverse_ptr, delta_ptr, s_ptr)
    # Splits first: if their number divides that of the multiprocessors, all programs of one have the same V and ds.
    split = tl.program_id(0)
    lo = tl.program_id(1) * chunk
    hi = tl.minimum(lo + chunk, I)
    before_ptr = state_ptr + (2 * START - 1) * D
    batch_start = split * tiles
    batch_end = tl.minimum(batch_start + tiles, batch_tiles(inputs, T))
    C: tl.constexpr = D // P
    KB: tl.constexpr = KP if K > 8 else 8  # what a product does not sum over needs no 16
    # See add_scaled(). Of many tiles the compiler would take long for the parts.
    PARTED: tl.constexpr = LANES > 0 and (HELD or NT == 1)
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
            last = group == groups - 1
            known = ()
            dw = ()
            for n in tl.static_range(NT):
                known = known + (valid_outputs(out_mask_ptr, rows, rows.inside, first + n, T),)
                if KEEP_DW:
                    dw = dw + (tl.zeros([JT * DP, KB], tl.float32),)
            held = ()
            ds_before = ()
            if HELD:
                if UNIFORM:
                    ds_before = tiles_of(before_ptr, vectors, first, T, 2 * R)
                for t in tl.static_range(START, R):
                    held = held + (states_of(state_ptr + 2 * t * D, vectors, states, first, T, 2 * R),)
            for i32 in range(lo, hi):
                here = input_capsule(inputs, rows, i32, T)
                a = per_input(activation_ptr, rows, here.ok, here.i, inputs) if activation_ptr is not None else None
                x = ()
                valid = ()
                dxs = ()
                for n in tl.static_range(NT):
                    valid = valid + (known[n] & here.ok[:, None],)
                    x = x + (votes_about_center(inputs, rows, vectors, here, first + n, valid[n], T),)
                    dxs = dxs + (no_terms(T, PARTED),)
                if UNIFORM:
                    ds = ds_before if HELD else tiles_of(before_ptr, vectors, first, T, 2 * R)
                    dxs = uniform_slopes(dxs, given, ds, each, a, x, valid, vectors, first, T, PARTED)
                dl = ()
                if dl_ptr is not None:
                    dl = zeros(JT, T)
                if HELD:
                    for t in tl.static_range(START, R):
                        dxs, dl = add_iteration(
                            dxs, dl, inputs, given, norms, state_ptr, held[t - START], dactivation_ptr, drow_ptr,
                            a, x, valid, rows, vectors, states, here, known, first, t, T, R, MODE, AGREEMENT, PARTED
                        )
                else:
                    for t in range(START, R):
                        dxs, dl = add_iteration(
                            dxs, dl, inputs, given, norms, state_ptr, None, dactivation_ptr, drow_ptr,
                            a, x, valid, rows, vectors, states, here, known, first, t, T, R, MODE, AGREEMENT, PARTED
                        )
                dx = ()
                for n in tl.static_range(NT):
                    dx = dx + (whole(dxs[n], T) if PARTED else dxs[n][0],)

                if dl_ptr is not None:
                    for n in tl.static_range(NT):
                        store_logits_gradient(
                            dl_ptr, dl[n], inputs, rows, here, first + n, split, tile - batch_start, T
                        )
                if COMMON and dx_ptr is not None:
                    add_common_votes_gradient(dx_ptr, room_ptr, dx, inputs, rows, here, first, last, T)
                elif VOTES and dx_ptr is not None:
                    for n in tl.static_range(NT):
                        store_votes_gradient(dx_ptr, dx[n], inputs, rows, here, first + n, T)
                elif KEEP_DW:
                    dw = add_tiles(dw, add_products(
                        inputs, dx, rows, here, 0, first, last, dx_ptr, room_ptr, None, 0,
                        T, KB, BACK_DOT, AHEAD, PARTED, True
                    ), T)
                elif not VOTES:
                    owner = tl.cast(split, tl.int64) * I + here.i
                    stored = tile - batch_start
                    if SHARED:
                        owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                        stored += i32 - lo
                    dw_at = None if dw_ptr is None else dw_ptr + owner * (J * C * K)
                    for k0 in range(0, K, KB):
                        add_products(
                            inputs, dx, rows, here, k0, first, last, dx_ptr, room_ptr, dw_at, stored,
                            T, KB, BACK_DOT, AHEAD, PARTED, False
                        )
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
