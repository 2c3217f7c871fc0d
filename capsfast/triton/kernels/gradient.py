"""The gradient pass: dvotes = sum_t c_t ds_t + db_t V_t, and from it du, dW and dlogits.

V_t is what iteration t scored with; t counts from 0, so V_0 = 0. Program (chunk, split) has the input capsules of its
chunk and the batch tiles of its split. No other program writes du of these, or dW of these input capsules in
partial[split]; tiles of outputs and of the batch after the first are added to what it stored before. So there are no
atomics, and no sum depends on the order in which programs run. passes.py adds up the splits of dW in order. A weight
that all input capsules share has a partial dW per program.

A routing pass is one iteration. V is its query, ds the gradient of its first moment, and with x, the votes about a
center, dvotes = c (ds + 2 dsecond x) + db (V - precision x).

The coefficients c_t and db_t of all iterations are computed first. Then dvotes are made from them and used up one tile
after the other: the registers would not hold dvotes of all outputs beside the votes.
"""

import triton
import triton.language as tl

from .softmax import agreement_gradient, couple, scaled
from .tiles import (
    batch_rows,
    batch_tiles,
    by_warp,
    centered,
    columns,
    components,
    coupling_gradient,
    input_capsules,
    load_numbers,
    load_vectors,
    of_batch,
    outputs,
    per_input,
    pose_rows,
    product,
    routing_logits,
    slope,
    spread,
    store_pairs,
    valid_inputs,
    valid_outputs,
    valid_rows,
    votes_tile,
    weight_tile,
)


@triton.jit
def add_to(at, value, within, stored):
    """Stores value or, if stored > 0, adds it to what this program stored before."""
    again = tl.zeros(within.shape, tl.int32) + stored > 0
    before = tl.load(at, mask=within & again, other=0.0)
    tl.store(at, before.to(tl.float32) + value, mask=within)


@triton.jit
def add_weight_gradient(
    dw_ptr, value, n, k0, stored,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr,
):
    """Stores tile n of dW [J, D, K] of an input capsule, components k from k0 on."""
    j, d = columns(n, JT, DP, False)
    k = components(k0, KP, False)
    within = ((j < J) & (d < D))[:, None] & (k < K)[None, :]
    add_to(dw_ptr + ((j * D + d) * K)[:, None] + k[None, :], value, within, stored)


@triton.jit
def add_input_gradient(
    dx_ptr, value, rows, inside, i, k0, I, stored, K: tl.constexpr, P: tl.constexpr, KP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Stores du of input capsule i for the rows, in [B, I, P K], components k from k0 on."""
    k = components(k0, KP, WIDE)
    at = dx_ptr + (rows[0] * I + i) * (P * K) + (rows[1] * I * (P * K))[:, None] + k[None, :]
    if P > 1:
        at += pose_rows(rows, K)[:, None]
    add_to(at, value, inside[:, None] & (k < K)[None, :], stored)


@triton.jit
def store_votes_gradient(
    dx_ptr, value, rows, inside, i, n, I, positions,
    J: tl.constexpr, D: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr,
):
    """Stores tile n of dvotes of input capsule i for the samples, in [B, I, J, D]."""
    j, d = columns(n, JT, DP, WIDE)
    if positions is None:
        at = dx_ptr + (rows[0] * I + i) * (J * D) + (rows[1] * I * (J * D))[:, None] + (j * D + d)[None, :]
    else:
        batch = rows[0] // positions
        at = dx_ptr + rows[0] + ((batch * I + i) * (J * D) - batch) * positions
        at = at + rows[1][:, None] + ((j * D + d) * positions)[None, :]
    tl.store(at, value, mask=inside[:, None] & ((j < J) & (d < D))[None, :])


@triton.jit
def add_common_votes_gradient(
    dx_ptr, value, rows, inside, i, I, stored, D: tl.constexpr, DP: tl.constexpr, WIDE: tl.constexpr
):
    """Stores dvotes [BB, DP] of input capsule i for the samples, in [B, I, 1, D]: of votes that all outputs share."""
    d = components(0, DP, WIDE)
    at = dx_ptr + (rows[0] * I + i) * D + (rows[1] * I * D)[:, None] + d[None, :]
    add_to(at, value, inside[:, None] & (d < D)[None, :], stored)


@triton.jit
def add_inputs_gradient(ptr, value, rows, inside, i, I, stored):
    """Stores a number of input capsule i for each sample, [BB], in [B, I]."""
    add_to(ptr + (rows[0] * I + i) + rows[1] * I, value, inside, stored)


@triton.jit
def store_logits_gradient(
    dl_ptr, value, rows, inside, i, n, I, positions, split, stored,
    J: tl.constexpr, JT: tl.constexpr, WIDE: tl.constexpr, SUM: tl.constexpr,
):
    """Stores tile n of dlogits of input capsule i: per sample in [B, I, J] or, if SUM, summed in [splits, I, J]."""
    j = outputs(n, JT, WIDE)
    if SUM:
        add_to(dl_ptr + (tl.cast(split, tl.int64) * I + i) * J + j, tl.sum(value, 0), j < J, stored)
    else:
        store_pairs(dl_ptr, value, rows, inside, i, n, I, positions, J, JT, WIDE)


@triton.jit(
    do_not_specialize=["B", "I", "chunk", "tiles", "groups"], do_not_specialize_on_alignment=["inverse_ptr"]
)
def gradient_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,  # of a pass: float32 [B, J, D] twice, [B, J], [B, I], or None
    dcoupling_ptr,
    dmass_ptr, dsecond_ptr, dlse_ptr,  # of a pass: float32 [B, J], [B, J, D], [B, I], or None
    state_ptr,  # V and ds of every iteration, [B, J, R, 2, D] float32, so that offsets between them are constants
    rows_ptr,  # [R, 3, B, I] float32, MODE "row_norm"
    norm_ptr, inverse_ptr, delta_ptr,  # [R, B, J] float32, MODE "in"
    factor_ptr,  # [B] float32 or None, if UNIFORM: the coupling of the first iteration
    dx_ptr,  # out: du [B, I, P K] or dvotes [B, I, J, D], [B, I, 1, D] if COMMON, or None
    dw_ptr,  # out: [splits, I, J, D / P, K] or, if SHARED, [programs, J, D / P, K], or None
    dl_ptr,  # out: [B, I, J] or, if SUM_LOGITS, [splits, I, J], or None
    dactivation_ptr, drow_ptr,  # out, of a pass: [B, I] float32, or None. drow: of a log-sum-exp that is given
    x_b, x_i, w_i, l_b, l_i, l_j, m_b, m_i, o_b, o_j, d_b, d_i, d_j,
    positions, s_j, s_d, x_jump, l_jump, d_jump,  # of votes with positions, or None
    B, I, chunk, tiles, groups, factor,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, BACK_DOT: tl.constexpr,
    LEAKY: tl.constexpr, QUERY: tl.constexpr, QUADRATIC: tl.constexpr, MODE: tl.constexpr,
    START: tl.constexpr, R: tl.constexpr, UNIFORM: tl.constexpr, AGREEMENT: tl.constexpr,
    SHARED: tl.constexpr, COMMON: tl.constexpr, SUM_LOGITS: tl.constexpr, WARPS: tl.constexpr,
):
    """START: the first iteration whose coupling depends on the pair (i, j). UNIFORM: the iteration before START has a
    gradient too, and all its couplings are equal. AGREEMENT: gradient="full". COMMON: all outputs have the same votes.
    tiles: batch tiles of a split.
    """
    split = tl.program_id(1)
    lo = tl.program_id(0) * chunk
    hi = tl.minimum(lo + chunk, I)
    xs = (x_b, x_i, x_j, x_d) if positions is None else (x_b, x_i, s_j, s_d)
    ws = (w_i, w_j, w_d, w_k)
    plane = tl.cast(B, tl.int64) * J
    first_tile = split * tiles
    last_tile = tl.minimum(first_tile + tiles, batch_tiles(B, positions, BB, PP))
    C: tl.constexpr = D // P
    keep_dw: tl.constexpr = SHARED and K <= KP
    for tile in range(first_tile, last_tile):
        rows = batch_rows(tile, positions, BB, PP, WIDE)
        inside, once = valid_rows(rows, B, positions, P)
        x_at = of_batch(x_ptr, rows, positions, x_jump)
        logits_at = of_batch(logits_ptr, rows, positions, l_jump)
        dcoupling_at = of_batch(dcoupling_ptr, rows, positions, d_jump)
        if factor_ptr is not None:
            each = tl.load(factor_ptr + rows[0] + rows[1], mask=inside, other=0.0)
        else:
            each = tl.zeros([BB], tl.float32) + factor
        for group in range(groups):
            first = group * NT
            known = ()
            dw = ()
            for n in tl.static_range(NT):
                known = known + (valid_outputs(out_mask_ptr, rows, inside, first + n, o_b, o_j, J, JT, WIDE),)
                if keep_dw:
                    dw = dw + (tl.zeros([WARPS, JT * DP // WARPS, KP], tl.float32),)
            for i32 in range(lo, hi):
                i = tl.cast(i32, tl.int64)
                ok = valid_inputs(mask_ptr, rows, inside, i, m_b, m_i)
                u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_at, rows, ok, i, 0, xs, K, KP, WIDE)
                x = ()
                valid = ()
                for n in tl.static_range(NT):
                    votes = votes_tile(
                        u, x_at, w_ptr, mask_ptr, rows, ok, i, first + n, xs, ws, J, C, K,
                        BB, JT, DP, KP, VOTES, DOT, WIDE
                    )
                    pairs = known[n] & ok[:, None]
                    if QUADRATIC:
                        votes = centered(
                            votes, center_ptr, mask_ptr, out_mask_ptr, pairs, rows, inside, first + n,
                            J, D, P, BB, JT, DP
                        )
                    x = x + (votes,)
                    valid = valid + (pairs,)
                if activation_ptr is not None:
                    a = per_input(activation_ptr, rows, ok, i, I)

                weights = ()  # for each iteration a pair (c, db) of tuples of NT tiles [BB, JT]
                for t in tl.static_range(START, R):
                    at = t * plane
                    b = ()
                    dc = ()
                    maximum = ()
                    inverses = ()
                    delta = ()
                    for n in tl.static_range(NT):
                        V = None
                        if QUERY:
                            V = load_vectors(state_ptr + 2 * t * D, rows, inside, first + n, J, D, P, JT, DP, 2 * R)
                        ds = load_vectors(state_ptr + (2 * t + 1) * D, rows, inside, first + n, J, D, P, JT, DP, 2 * R)
                        b = b + (routing_logits(
                            x[n], V, logits_at, precision_ptr, prior_ptr, rows, inside, i, first + n,
                            (l_b, l_i, l_j), valid[n], J, D, P, BB, JT, DP, WIDE,
                            0.0 if MODE == "none" else float("-inf")
                        ),)
                        dc = dc + (coupling_gradient(
                            x[n], ds, dcoupling_at if t == R - 1 else None, dmass_ptr, dsecond_ptr, rows, inside, i,
                            first + n, (d_b, d_i, d_j), valid[n], J, D, P, BB, JT, DP, WIDE
                        ),)
                        if MODE == "in":
                            maximum = maximum + (load_numbers(norm_ptr + at, rows, known[n], first + n, J, JT),)
                            inverses = inverses + (load_numbers(inverse_ptr + at, rows, known[n], first + n, J, JT),)
                            delta = delta + (load_numbers(delta_ptr + at, rows, known[n], first + n, J, JT),)
                    row_at = rows_ptr
                    if MODE == "row_norm":
                        row_at = rows_ptr + 3 * t * tl.cast(B, tl.int64) * I
                    c, _ = couple(b, row_at, (maximum, inverses), rows, ok, i, B, I, NT, LEAKY, MODE)
                    if dactivation_ptr is not None:
                        da = tl.sum(tl.where(valid[0], c[0] * dc[0], 0.0), 1)
                        for n in tl.static_range(1, NT):
                            da += tl.sum(tl.where(valid[n], c[n] * dc[n], 0.0), 1)
                        add_inputs_gradient(dactivation_ptr, da, rows, once, i, I, group)
                    if activation_ptr is not None:
                        dc = scaled(dc, a, NT)
                    db = agreement_gradient(c, dc, valid, row_at, delta, dlse_ptr, rows, ok, i, B, I, NT, MODE)
                    if drow_ptr is not None:
                        drow = -tl.sum(db[0], 1)
                        for n in tl.static_range(1, NT):
                            drow -= tl.sum(db[n], 1)
                        add_inputs_gradient(drow_ptr, drow, rows, once, i, I, group)
                    if activation_ptr is not None:
                        c = scaled(c, a, NT)
                    weights = weights + ((c, db),)

                more_dw = ()
                du = tl.zeros([WARPS, BB, KP], tl.float32)
                dvotes = tl.zeros([BB, DP], tl.float32)
                u_each = u
                if not VOTES:
                    u_each = tl.broadcast_to(u.to(tl.float32)[None, :, :], [WARPS, BB, KP])
                for n in tl.static_range(NT):
                    dx = tl.zeros([BB, JT * DP], tl.float32)
                    dl = tl.zeros([BB, JT], tl.float32)
                    if UNIFORM:
                        c0 = tl.where(valid[n], each[:, None], 0.0)
                        if activation_ptr is not None:
                            c0 *= a[:, None]
                        ds_0 = load_vectors(
                            state_ptr + (2 * START - 1) * D, rows, inside, first + n, J, D, P, JT, DP, 2 * R
                        )
                        dx += spread(c0, BB, JT, DP) * slope(
                            ds_0, x[n], dsecond_ptr, 2.0, rows, inside, first + n, J, D, P, JT, DP
                        )
                    for t in tl.static_range(START, R):
                        ds_t = load_vectors(
                            state_ptr + (2 * t + 1) * D, rows, inside, first + n, J, D, P, JT, DP, 2 * R, True
                        )
                        dx += spread(weights[t - START][0][n], BB, JT, DP) * slope(
                            ds_t, x[n], dsecond_ptr, 2.0, rows, inside, first + n, J, D, P, JT, DP, True
                        )
                        if AGREEMENT:
                            V_t = None
                            if QUERY:
                                V_t = load_vectors(
                                    state_ptr + 2 * t * D, rows, inside, first + n, J, D, P, JT, DP, 2 * R, True
                                )
                            dx += spread(weights[t - START][1][n], BB, JT, DP) * slope(
                                V_t, x[n], precision_ptr, -1.0, rows, inside, first + n, J, D, P, JT, DP, True
                            )
                        dl += weights[t - START][1][n]
                    if dl_ptr is not None:
                        if P > 1:
                            dl = tl.where(once[:, None], dl, 0.0)
                        store_logits_gradient(
                            dl_ptr, dl, rows, once, i, first + n, I, positions, split, tile - first_tile, J, JT,
                            WIDE, SUM_LOGITS
                        )
                    if VOTES:
                        if COMMON:
                            dvotes += tl.sum(tl.reshape(dx, [BB, JT, DP]), 1)
                        elif dx_ptr is not None:
                            store_votes_gradient(
                                dx_ptr, tl.where(ok[:, None], dx, 0.0), rows, inside, i, first + n, I, positions, J, D,
                                JT, DP, WIDE
                            )
                    else:
                        if dx_ptr is not None and K <= KP:
                            w = weight_tile(w_ptr, i, first + n, 0, ws, J, C, K, JT, DP, KP, WIDE).to(tl.float32)
                            w_each = tl.reshape(w, [WARPS, JT * DP // WARPS, KP])
                            du = product(by_warp(dx, BB, JT * DP, WARPS), w_each, du, BACK_DOT)
                        if dx_ptr is not None and K > KP:
                            for k0 in range(0, K, KP):
                                w_part = weight_tile(
                                    w_ptr, i, first + n, k0, ws, J, C, K, JT, DP, KP, WIDE
                                ).to(tl.float32)
                                w_parts = tl.reshape(w_part, [WARPS, JT * DP // WARPS, KP])
                                no_du = tl.zeros([WARPS, BB, KP], tl.float32)
                                du_part = tl.sum(product(by_warp(dx, BB, JT * DP, WARPS), w_parts, no_du, BACK_DOT), 0)
                                add_input_gradient(
                                    dx_ptr, tl.where(ok[:, None], du_part, 0.0), rows, inside, i, k0, I, first + n, K,
                                    P, KP, WIDE
                                )
                            # The next tile adds to what was stored here, which other threads may have done.
                            tl.debug_barrier()
                        if dw_ptr is not None and keep_dw:
                            dx_each = tl.permute(by_warp(dx, BB, JT * DP, WARPS), (0, 2, 1))
                            none = tl.zeros([WARPS, JT * DP // WARPS, KP], tl.float32)
                            more_dw = more_dw + (dw[n] + product(dx_each, u_each, none, BACK_DOT),)
                        if dw_ptr is not None and not keep_dw:
                            owner = tl.cast(split, tl.int64) * I + i
                            stored = tile - first_tile
                            if SHARED:
                                owner = tl.cast(split, tl.int64) * tl.num_programs(0) + tl.program_id(0)
                                stored += i32 - lo
                            for k0 in range(0, K, KP):
                                u_part = input_capsules(x_at, rows, ok, i, k0, xs, K, KP, WIDE).to(tl.float32)
                                u_parts = tl.broadcast_to(u_part[None, :, :], [WARPS, BB, KP])
                                dx_parts = tl.permute(by_warp(dx, BB, JT * DP, WARPS), (0, 2, 1))
                                no_dw = tl.zeros([WARPS, JT * DP // WARPS, KP], tl.float32)
                                dw_part = product(dx_parts, u_parts, no_dw, BACK_DOT)
                                add_weight_gradient(
                                    dw_ptr + owner * (J * C * K), tl.reshape(dw_part, [JT * DP, KP]), first + n, k0,
                                    stored, J, C, K, JT, DP, KP
                                )
                if dw_ptr is not None and keep_dw:
                    dw = more_dw
                if COMMON and dx_ptr is not None:
                    add_common_votes_gradient(
                        dx_ptr, tl.where(ok[:, None], dvotes, 0.0), rows, inside, i, I, group, D, DP, WIDE
                    )
                if not VOTES and K <= KP:
                    if dx_ptr is not None:
                        add_input_gradient(
                            dx_ptr, tl.where(ok[:, None], tl.sum(du, 0), 0.0), rows, inside, i, 0, I, group, K, P,
                            KP, WIDE
                        )
                if SHARED and not keep_dw:
                    # The next input capsule adds to this dW, which other threads may have stored.
                    tl.debug_barrier()
            # The next tile or group adds to what other threads may have stored.
            tl.debug_barrier()
            if keep_dw and dw_ptr is not None:
                owner = tl.cast(split, tl.int64) * tl.num_programs(0) + tl.program_id(0)
                for n in tl.static_range(NT):
                    add_weight_gradient(
                        dw_ptr + owner * (J * C * K), tl.reshape(dw[n], [JT * DP, KP]), first + n, 0,
                        tile - first_tile, J, C, K, JT, DP, KP
                    )
                tl.debug_barrier()
