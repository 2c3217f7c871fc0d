"""The gradient pass: dvotes = sum_t c_t ds_t + db_t V_t, and from it du, dW and dlogits.

V_t is what iteration t scored with; t counts from 0, so V_0 = 0. Program (split, chunk) has the input capsules of its
chunk and the batch tiles of its split. No other program writes du of these, or dW of these input capsules in
partial[split]; tiles of outputs and of the batch after the first are added to what it stored before. So there are no
atomics, and no sum depends on the order in which programs run. passes.py adds up the splits of dW in order. A weight
that all input capsules share has a partial dW per program.

A routing pass is one iteration. V is its query, ds the gradient of its first moment, and with x, the votes about a
center, dvotes = c (ds + 2 dsecond x) + db (V - precision x).

The votes and dvotes of an input capsule stay in registers while a loop over the iterations adds to dvotes. V_t and
ds_t are loaded twice, once for the coefficients c_t and db_t and once for the sum, the second time from L1.
"""

import triton
import triton.language as tl

from .products import together, votes_to_inputs, votes_to_weights
from .softmax import agreement_gradient, couple, over_tiles, scaled
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
    of_batch,
    per_input,
    valid_inputs,
    valid_outputs,
    valid_rows,
    where_valid,
)
from .vectors import centered, load_numbers, load_state, load_vectors, slope, spread, vector_tile
from .votes import coupling_gradient, input_capsules, routing_logits, votes_tile, weight_tile


@triton.jit(
    do_not_specialize=["B", "I", "chunk", "tiles", "groups"], do_not_specialize_on_alignment=["inverse_ptr", "s_ptr"]
)
def gradient_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,  # of a pass: float32 [B, J, D] twice, [B, J], [B, I], or None
    dcoupling_ptr,
    dmass_ptr, dsecond_ptr, dlse_ptr,  # of a pass: float32 [B, J], [B, J, D], [B, I], or None
    state_ptr,  # V and ds of every iteration, [B, J, R, 2, D] float32, so that offsets between them are constants
    rows_ptr,  # [R, 3, B, I] float32, MODE "row_norm"
    norm_ptr, inverse_ptr,  # [R, B, J] float32, MODE "in"
    delta_ptr,  # [R, B, J] float32 or None, MODE "in": sum_i c dc, or without s_ptr's part
    s_ptr,  # [R, B, J, D] float32 or None, MODE "in": sum_i c x
    factor_ptr,  # [B] float32 or None, if UNIFORM: the coupling of the first iteration
    dx_ptr,  # out: du [B, I, P K] or dvotes [B, I, J, D], [B, I, 1, D] if COMMON, or None
    dw_ptr,  # out: [splits, I, J, D / P, K] or, if SHARED, [programs, J, D / P, K], or None
    dl_ptr,  # out: [B, I, J] or, if SHARED_LOGITS, [splits, I, J], or None
    dactivation_ptr, drow_ptr,  # out, of a pass: [B, I] float32, or None. drow: of a log-sum-exp that is given
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,  # of votes with positions, or None
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
    # Splits first: if their number divides that of the multiprocessors, all programs of one have the same V and ds.
    split = tl.program_id(0)
    lo = tl.program_id(1) * chunk
    hi = tl.minimum(lo + chunk, I)
    xs = (x_b, x_i, x_j, x_d) if positions is None else (x_b, s_i, s_j, s_d)
    ws = (w_i, w_j, w_d, w_k)
    ls = (I, positions, SHARED_LOGITS, NT * JT < J)
    cs = (I, positions, False, NT * JT < J)
    plane = tl.cast(B, tl.int64) * J
    batch_start = split * tiles
    batch_end = tl.minimum(batch_start + tiles, batch_tiles(B, positions, BB, PP))
    C: tl.constexpr = D // P
    KB: tl.constexpr = KP if K > 8 else 8  # what a product does not sum over needs no 16
    keep_dw: tl.constexpr = SHARED and K <= KB and dw_ptr is not None
    ACROSS: tl.constexpr = JT * LANES // 4  # warps that have the columns of a row; 0 if votes are given
    for tile in range(batch_start, batch_end):
        rows = batch_rows(tile, B, positions, BB, PP, WIDE)
        inside, once = valid_rows(rows, P)
        vectors = vector_tile(rows, inside, J, D, P, JT, DP, LANES)
        states = vector_tile(rows, inside, J, D, P, JT, DP, LANES, 2)
        x_at = of_batch(x_ptr, rows, positions, x_jump)
        if factor_ptr is not None:
            each = tl.load(factor_ptr + rows[0] + rows[1], mask=inside, other=0.0)
        else:
            each = tl.zeros([BB], tl.float32) + factor
        for group in range(groups):
            first = first_tile(group, J, JT, NT)
            known = ()
            dw = ()
            for n in tl.static_range(NT):
                known = known + (valid_outputs(out_mask_ptr, rows, inside, first + n, J, JT),)
                if keep_dw:
                    dw = dw + (tl.zeros([JT * DP, KB], tl.float32),)
            for i32 in range(lo, hi):
                i = tl.cast(i32, tl.int64)
                ok = valid_inputs(mask_ptr, rows, inside, i, I)
                u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_at, rows, ok, i, 0, xs, K, KP, WIDE)
                x = ()
                valid = ()
                for n in tl.static_range(NT):
                    votes = votes_tile(
                        u, x_at, w_ptr, mask_ptr, rows, ok, i, first + n, xs, ws, J, C, K,
                        BB, JT, DP, LANES, KP, VOTES, DOT, WIDE
                    )
                    pairs = known[n] & ok[:, None]
                    if QUADRATIC:
                        votes = centered(
                            votes, center_ptr, mask_ptr, out_mask_ptr, pairs, vectors, first + n,
                            J, D, P, BB, JT, DP, LANES
                        )
                    x = x + (votes,)
                    valid = valid + (pairs,)
                if activation_ptr is not None:
                    a = per_input(activation_ptr, rows, ok, i, I)

                dx = ()
                dl = ()
                for n in tl.static_range(NT):
                    part = tl.zeros([BB, JT * DP], tl.float32)
                    if UNIFORM:
                        c0 = where_valid(valid[n], tl.broadcast_to(each[:, None], [BB, JT]), 0.0, MASKED)
                        if activation_ptr is not None:
                            c0 *= a[:, None]
                        ds = load_vectors(
                            state_ptr + (2 * START - 1) * D, vectors, first + n, J, D, P, JT, DP, LANES, 2 * R
                        )
                        part = spread(c0, BB, JT, DP, LANES) * slope(
                            ds, x[n], dsecond_ptr, 2.0, vectors, first + n, J, D, P, JT, DP, LANES
                        )
                    dx = dx + (part,)
                    if dl_ptr is not None:
                        dl = dl + (tl.zeros([BB, JT], tl.float32),)
                for t in range(START, R):
                    at = t * plane
                    state_at = state_ptr + 2 * t * D
                    b = ()
                    dc = ()
                    maximum = ()
                    inverses = ()
                    delta = ()
                    for n in tl.static_range(NT):
                        V = None
                        if QUERY:
                            V, ds = load_state(state_at, states, first + n, J, D, P, JT, DP, LANES, 2 * R)
                        else:
                            ds = load_vectors(state_at + D, vectors, first + n, J, D, P, JT, DP, LANES, 2 * R)
                        b = b + (routing_logits(
                            x[n], V, logits_ptr, precision_ptr, prior_ptr, rows, vectors, i, first + n,
                            ls, valid[n], MASKED, J, D, P, BB, JT, DP, LANES, WIDE,
                            0.0 if MODE == "none" else float("-inf")
                        ),)
                        s = None
                        if s_ptr is not None:
                            s_at = s_ptr + at * D
                            if D % 4 == 0:
                                # As in accumulate.py.
                                s_at = tl.multiple_of(s_at, 16)
                            s = load_vectors(s_at, vectors, first + n, J, D, P, JT, DP, LANES)
                        dc = dc + (coupling_gradient(
                            x[n], s, ds, dcoupling_ptr, dmass_ptr, dsecond_ptr, rows, vectors, i, first + n,
                            cs, valid[n], t == R - 1, J, D, P, BB, JT, DP, LANES, WIDE
                        ),)
                        if MODE == "in":
                            maximum = maximum + (load_numbers(norm_ptr + at, rows, known[n], first + n, J, JT),)
                            inverses = inverses + (load_numbers(inverse_ptr + at, rows, known[n], first + n, J, JT),)
                            if delta_ptr is None:
                                delta = delta + (tl.zeros([BB, JT], tl.float32),)
                            else:
                                delta = delta + (load_numbers(delta_ptr + at, rows, known[n], first + n, J, JT),)
                    row_at = rows_ptr
                    if MODE == "row_norm":
                        row_at = rows_ptr + 3 * t * tl.cast(B, tl.int64) * I
                    c, _ = couple(b, row_at, (maximum, inverses), rows, ok, i, B, I, NT, LEAKY, MODE)
                    if dactivation_ptr is not None:
                        da = ()
                        for n in tl.static_range(NT):
                            da = da + (where_valid(valid[n], c[n] * dc[n], 0.0, MASKED),)
                        add_inputs_gradient(dactivation_ptr, over_tiles(da, NT), rows, once, i, I, first)
                    if activation_ptr is not None:
                        dc = scaled(dc, a, NT)
                    db = agreement_gradient(c, dc, valid, MASKED, row_at, delta, dlse_ptr, rows, ok, i, B, I, NT, MODE)
                    if drow_ptr is not None:
                        add_inputs_gradient(drow_ptr, -over_tiles(db, NT), rows, once, i, I, first)
                    if activation_ptr is not None:
                        c = scaled(c, a, NT)
                    more_dx = ()
                    more_dl = ()
                    for n in tl.static_range(NT):
                        V = None
                        if QUERY:
                            V, ds = load_state(state_at, states, first + n, J, D, P, JT, DP, LANES, 2 * R, True)
                        else:
                            ds = load_vectors(state_at + D, vectors, first + n, J, D, P, JT, DP, LANES, 2 * R, True)
                        part = dx[n] + spread(c[n], BB, JT, DP, LANES) * slope(
                            ds, x[n], dsecond_ptr, 2.0, vectors, first + n, J, D, P, JT, DP, LANES, True
                        )
                        if AGREEMENT:
                            part += spread(db[n], BB, JT, DP, LANES) * slope(
                                V, x[n], precision_ptr, -1.0, vectors, first + n, J, D, P, JT, DP, LANES, True
                            )
                        more_dx = more_dx + (part,)
                        if dl_ptr is not None:
                            more_dl = more_dl + (dl[n] + db[n],)
                    dx = more_dx
                    if dl_ptr is not None:
                        dl = more_dl

                more_dw = ()
                du = tl.zeros([BB, KB] if ACROSS <= 1 else [ACROSS, BB, KB], tl.float32)
                dvotes = tl.zeros([BB, DP], tl.float32)
                u_back = u if VOTES or KB == KP else input_capsules(x_at, rows, ok, i, 0, xs, K, KB, WIDE)
                for n in tl.static_range(NT):
                    if dl_ptr is not None:
                        dl_n = tl.where(once[:, None], dl[n], 0.0) if SHARED_LOGITS else dl[n]
                        store_logits_gradient(
                            dl_ptr, dl_n, rows, once, i, first + n, cs, split, tile - batch_start, J, JT,
                            WIDE, SHARED_LOGITS
                        )
                    if VOTES:
                        if COMMON:
                            dvotes += tl.sum(tl.reshape(dx[n], [BB, JT, DP]), 1)
                        elif dx_ptr is not None:
                            store_votes_gradient(
                                dx_ptr, tl.where(ok[:, None], dx[n], 0.0), rows, inside, i, first + n, I, positions,
                                J, D, JT, DP, LANES, WIDE
                            )
                    else:
                        if dx_ptr is not None and K <= KB:
                            w = weight_tile(w_ptr, i, first + n, 0, ws, J, C, K, JT, DP, LANES, KB, WIDE)
                            du = votes_to_inputs(dx[n], w, du, ACROSS, BACK_DOT)
                        if dx_ptr is not None and K > KB:
                            for k0 in range(0, K, KB):
                                w_part = weight_tile(w_ptr, i, first + n, k0, ws, J, C, K, JT, DP, LANES, KB, WIDE)
                                none = tl.zeros(du.shape, tl.float32)
                                du_part = together(votes_to_inputs(dx[n], w_part, none, ACROSS, BACK_DOT), ACROSS)
                                add_input_gradient(
                                    dx_ptr, tl.where(ok[:, None], du_part, 0.0), rows, i, k0, I, first + n, K, P, KB,
                                    WIDE
                                )
                            # The next tile adds to what was stored here, which other threads may have done.
                            tl.debug_barrier()
                        if keep_dw:
                            more_dw = more_dw + (dw[n] + votes_to_weights(dx[n], u_back, ACROSS, BACK_DOT),)
                        elif dw_ptr is not None:
                            owner = tl.cast(split, tl.int64) * I + i
                            stored = tile - batch_start
                            if SHARED:
                                owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                                stored += i32 - lo
                            for k0 in range(0, K, KB):
                                u_k = u_back if K <= KB else input_capsules(x_at, rows, ok, i, k0, xs, K, KB, WIDE)
                                add_weight_gradient(
                                    dw_ptr + owner * (J * C * K), votes_to_weights(dx[n], u_k, ACROSS, BACK_DOT),
                                    first + n, k0, stored, J, C, K, BB, JT, DP, LANES, KB, WIDE
                                )
                if keep_dw:
                    dw = more_dw
                if COMMON and dx_ptr is not None:
                    add_common_votes_gradient(
                        dx_ptr, tl.where(ok[:, None], dvotes, 0.0), rows, inside, i, I, first, D, DP, WIDE
                    )
                if not VOTES and K <= KB and dx_ptr is not None:
                    add_input_gradient(
                        dx_ptr, tl.where(ok[:, None], together(du, ACROSS), 0.0), rows, i, 0, I, first, K, P, KB, WIDE
                    )
                if SHARED and K > KB:
                    # The next input capsule adds to this dW, which other threads may have stored.
                    tl.debug_barrier()
            # The next tile or group adds to what other threads may have stored.
            tl.debug_barrier()
            if keep_dw:
                owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                for n in tl.static_range(NT):
                    add_weight_gradient(
                        dw_ptr + owner * (J * C * K), dw[n], first + n, 0,
                        tile - batch_start, J, C, K, BB, JT, DP, LANES, KB, WIDE
                    )
                tl.debug_barrier()
