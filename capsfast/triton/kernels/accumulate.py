"""One pass over the input capsules: partial sums of s, or of the moments of a routing pass, in the forward, and in the
backward of G, or of what the gradients of query, precision, center and prior are made of.

Program (batch tile, split, group) has BB samples, a slice of the input capsules and NT tiles of outputs. It keeps its
sums in registers and stores them as partial[split]. update.py adds the splits in a fixed order, so no sum depends on
the order in which programs run.
"""

import triton
import triton.language as tl

from .softmax import agreement_gradient, couple, exponential, finite_or_zero, scaled
from .tiles import batch_rows, first_tile, of_batch, per_input, store_pairs, valid_inputs, valid_outputs, valid_rows
from .vectors import (
    centered,
    load_numbers,
    load_state,
    load_vectors,
    reread_tiles,
    spread,
    store_numbers,
    store_vectors,
    vector_tile,
)
from .votes import coupling_gradient, input_capsules, reread, routing_logits, votes_tile


@triton.jit(do_not_specialize=["B", "I", "chunk"], do_not_specialize_on_alignment=["rows_ptr"])
def accumulate_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,  # of a pass: float32 [B, J, D] twice, [B, J], [B, I], or None
    V_ptr,  # [B, J, D] float32, if QUERY
    rows_ptr,  # [3, B, I] float32, MODE "row_norm"
    partial_ptr,  # [splits, B, J, D] float32, out: sum_i c x
    online_ptr,  # [2, splits, B, J] float32, out for MODE "in": maximum and sum of exponentials
    mass_ptr,  # [splits, B, J] float32, out: sum_i c, or None
    second_ptr,  # [splits, B, J, D] float32, out: sum_i c x^2, or None
    coupling_ptr,  # [B, I, J], out, or None; not for MODE "in" and "uniform"
    lse_ptr,  # [B, I] float32, out for MODE "out": log-sum-exp, or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,  # of votes with positions, or None
    B, I, chunk,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, SHARED_LOGITS: tl.constexpr, LEAKY: tl.constexpr,
    QUERY: tl.constexpr, QUADRATIC: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr,
):
    """MODE as in softmax.py, or "uniform": in the first pass without logits all couplings are equal and taken as 1.

    QUADRATIC: something beyond the score with V and the first moment is given or asked for. activation multiplies c.
    """
    rows = batch_rows(tl.program_id(0), B, positions, BB, PP, WIDE)
    split = tl.program_id(1)
    first = first_tile(tl.program_id(2), J, JT, NT)
    inside, once = valid_rows(rows, P)
    vectors = vector_tile(rows, inside, J, D, P, JT, DP, LANES)
    C: tl.constexpr = D // P
    xs = (x_b, x_i, x_j, x_d) if positions is None else (x_b, s_i, s_j, s_d)
    x_ptr = of_batch(x_ptr, rows, positions, x_jump)
    ws = (w_i, w_j, w_d, w_k)
    ls = (I, positions, SHARED_LOGITS, NT * JT < J)
    cs = (I, positions, False, NT * JT < J)
    acc = ()
    mass = ()
    second = ()
    V = ()
    known = ()
    maximum = ()
    total = ()
    for n in tl.static_range(NT):
        acc = acc + (tl.zeros([BB, JT * DP], tl.float32),)
        if mass_ptr is not None:
            mass = mass + (tl.zeros([BB, JT], tl.float32),)
        if second_ptr is not None:
            second = second + (tl.zeros([BB, JT * DP], tl.float32),)
        if MODE != "uniform":
            if QUERY and LANES == 0:
                V = V + (load_vectors(V_ptr, vectors, first + n, J, D, P, JT, DP, LANES),)
            known = known + (valid_outputs(out_mask_ptr, rows, inside, first + n, J, JT),)
        if MODE == "in":
            maximum = maximum + (tl.full([BB, JT], float("-inf"), tl.float32),)
            total = total + (tl.zeros([BB, JT], tl.float32),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        i = tl.cast(i32, tl.int64)
        ok = valid_inputs(mask_ptr, rows, inside, i, I)
        w_at = w_ptr
        if not VOTES:
            w_at = reread(w_ptr, i32, w_i == 0 and J * D * K > 4096)
        beside = reread_tiles(vectors, i32, LANES, QUADRATIC)
        u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_ptr, rows, ok, i, 0, xs, K, KP, WIDE)
        sums = ()
        masses = ()
        seconds = ()
        if MODE == "uniform":
            if activation_ptr is not None:
                a = per_input(activation_ptr, rows, ok, i, I)
            for n in tl.static_range(NT):
                votes = votes_tile(
                    u, x_ptr, w_at, mask_ptr, rows, ok, i, first + n, xs, ws, J, C, K,
                    BB, JT, DP, LANES, KP, VOTES, DOT, WIDE
                )
                if QUADRATIC:
                    valid = tl.broadcast_to(ok[:, None], [BB, JT])
                    votes = centered(
                        votes, center_ptr, mask_ptr, None, valid, beside, first + n, J, D, P, BB, JT, DP, LANES
                    )
                weighted = votes * a[:, None] if activation_ptr is not None else votes
                sums = sums + (acc[n] + weighted,)
                if mass_ptr is not None:
                    c0 = a if activation_ptr is not None else ok.to(tl.float32)
                    masses = masses + (mass[n] + c0[:, None],)
                if second_ptr is not None:
                    seconds = seconds + (second[n] + weighted * votes,)
        else:
            x = ()
            b = ()
            for n in tl.static_range(NT):
                votes = votes_tile(
                    u, x_ptr, w_at, mask_ptr, rows, ok, i, first + n, xs, ws, J, C, K,
                    BB, JT, DP, LANES, KP, VOTES, DOT, WIDE
                )
                valid = known[n] & ok[:, None]
                if QUADRATIC:
                    votes = centered(
                        votes, center_ptr, mask_ptr, out_mask_ptr, valid, beside, first + n, J, D, P, BB, JT, DP, LANES
                    )
                V_n = None
                if QUERY and LANES == 0:
                    V_n = V[n]
                elif QUERY:
                    V_n = load_vectors(reread(V_ptr, i32, True), vectors, first + n, J, D, P, JT, DP, LANES)
                b = b + (routing_logits(
                    votes, V_n, logits_ptr, precision_ptr, prior_ptr, rows, beside, i, first + n,
                    ls, valid, MASKED, J, D, P, BB, JT, DP, LANES, WIDE,
                    0.0 if MODE == "none" else float("-inf")
                ),)
                x = x + (votes,)
            if MODE == "in":
                # The online softmax over i: when the maximum grows, the sums so far are rescaled.
                maxima = ()
                totals = ()
                for n in tl.static_range(NT):
                    grown = tl.maximum(maximum[n], b[n])
                    least = finite_or_zero(grown)
                    scale = exponential(maximum[n] - least)
                    e = exponential(b[n] - least)
                    maxima = maxima + (grown,)
                    totals = totals + (total[n] * scale + e,)
                    if activation_ptr is not None:
                        e *= per_input(activation_ptr, rows, ok, i, I)[:, None]
                    weighted = spread(e, BB, JT, DP, LANES) * x[n]
                    sums = sums + (acc[n] * spread(scale, BB, JT, DP, LANES) + weighted,)
                    if mass_ptr is not None:
                        masses = masses + (mass[n] * scale + e,)
                    if second_ptr is not None:
                        seconds = seconds + (second[n] * spread(scale, BB, JT, DP, LANES) + weighted * x[n],)
                maximum = maxima
                total = totals
            else:
                c, log_sum = couple(b, rows_ptr, (), rows, ok, i, B, I, NT, LEAKY, MODE)
                if lse_ptr is not None:
                    tl.store(lse_ptr + (rows[0] * I + i) + rows[1] * I, log_sum, mask=once)
                if activation_ptr is not None:
                    c = scaled(c, per_input(activation_ptr, rows, ok, i, I), NT)
                for n in tl.static_range(NT):
                    weighted = spread(c[n], BB, JT, DP, LANES) * x[n]
                    sums = sums + (acc[n] + weighted,)
                    if mass_ptr is not None:
                        masses = masses + (mass[n] + c[n],)
                    if second_ptr is not None:
                        seconds = seconds + (second[n] + weighted * x[n],)
                    if coupling_ptr is not None:
                        store_pairs(coupling_ptr, c[n], rows, once, i, first + n, cs, J, JT, WIDE)
        acc = sums
        if mass_ptr is not None:
            mass = masses
        if second_ptr is not None:
            second = seconds

    plane = tl.cast(split, tl.int64) * B * J
    for n in tl.static_range(NT):
        store_vectors(partial_ptr + plane * D, acc[n], rows, inside, first + n, J, D, P, JT, DP, LANES)
        if mass_ptr is not None:
            store_numbers(mass_ptr + plane, mass[n], rows, once, first + n, J, JT)
        if second_ptr is not None:
            store_vectors(second_ptr + plane * D, second[n], rows, inside, first + n, J, D, P, JT, DP, LANES)
        if MODE == "in":
            store_numbers(online_ptr + plane, maximum[n], rows, once, first + n, J, JT)
            totals_ptr = online_ptr + plane + tl.cast(tl.num_programs(1), tl.int64) * B * J
            store_numbers(totals_ptr, total[n], rows, once, first + n, J, JT)


# These pointers are into [R, ...] tensors, so their alignment depends on B. Triton would compile a kernel for each.
@triton.jit(
    do_not_specialize=["B", "I", "chunk"],
    do_not_specialize_on_alignment=["rows_ptr", "norm_ptr", "inverse_ptr", "delta_ptr", "s_ptr"],
)
def accumulate_gradient_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,  # of a pass: float32 [B, J, D] twice, [B, J], [B, I], or None
    dcoupling_ptr,
    dmass_ptr, dsecond_ptr, dlse_ptr,  # of a pass: float32 [B, J], [B, J, D], [B, I], or None
    state_ptr,  # V and ds of this iteration in [B, J, R, 2, D] float32
    rows_ptr,  # [3, B, I] float32, MODE "row_norm"
    norm_ptr, inverse_ptr,  # [B, J] float32, MODE "in"
    delta_ptr,  # [B, J] float32 or None, MODE "in": sum_i c dc, or without s_ptr's part
    s_ptr,  # [B, J, D] float32 or None, MODE "in": sum_i c x
    partial_ptr,  # [splits, B, J, D] float32, out: sum_i db x
    mass_ptr,  # [splits, B, J] float32, out: sum_i db, or None
    second_ptr,  # [splits, B, J, D] float32, out: sum_i db x^2, or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,  # of votes with positions, or None
    B, I, chunk,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, SHARED_LOGITS: tl.constexpr, LEAKY: tl.constexpr,
    QUERY: tl.constexpr, QUADRATIC: tl.constexpr, MASKED: tl.constexpr, MODE: tl.constexpr, R: tl.constexpr,
):
    """Partial sums of sum_i db votes, which one iteration adds to G, and those that a pass needs beside it."""
    rows = batch_rows(tl.program_id(0), B, positions, BB, PP, WIDE)
    split = tl.program_id(1)
    first = first_tile(tl.program_id(2), J, JT, NT)
    inside, once = valid_rows(rows, P)
    vectors = vector_tile(rows, inside, J, D, P, JT, DP, LANES)
    states = vector_tile(rows, inside, J, D, P, JT, DP, LANES, 2)
    C: tl.constexpr = D // P
    xs = (x_b, x_i, x_j, x_d) if positions is None else (x_b, s_i, s_j, s_d)
    x_ptr = of_batch(x_ptr, rows, positions, x_jump)
    ws = (w_i, w_j, w_d, w_k)
    ls = (I, positions, SHARED_LOGITS, NT * JT < J)
    cs = (I, positions, False, NT * JT < J)
    acc = ()
    mass = ()
    second = ()
    known = ()
    for n in tl.static_range(NT):
        acc = acc + (tl.zeros([BB, JT * DP], tl.float32),)
        if mass_ptr is not None:
            mass = mass + (tl.zeros([BB, JT], tl.float32),)
        if second_ptr is not None:
            second = second + (tl.zeros([BB, JT * DP], tl.float32),)
        known = known + (valid_outputs(None, rows, inside, first + n, J, JT),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        i = tl.cast(i32, tl.int64)
        ok = valid_inputs(mask_ptr, rows, inside, i, I)
        w_at = w_ptr
        if not VOTES:
            w_at = reread(w_ptr, i32, w_i == 0 and J * D * K > 4096)
        beside = reread_tiles(vectors, i32, LANES, QUADRATIC)
        u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_ptr, rows, ok, i, 0, xs, K, KP, WIDE)
        state = reread(state_ptr, i32, LANES > 0)
        x = ()
        b = ()
        dc = ()
        valid = ()
        maximum = ()
        inverses = ()
        delta = ()
        for n in tl.static_range(NT):
            votes = votes_tile(
                u, x_ptr, w_at, mask_ptr, rows, ok, i, first + n, xs, ws, J, C, K,
                BB, JT, DP, LANES, KP, VOTES, DOT, WIDE
            )
            outputs = known[n]
            if out_mask_ptr is not None:
                # Kept, it would take the registers that are missing here, unlike in the forward.
                outputs = valid_outputs(reread(out_mask_ptr, i32, True), rows, inside, first + n, J, JT)
            here = outputs & ok[:, None]
            if QUADRATIC:
                votes = centered(
                    votes, center_ptr, mask_ptr, out_mask_ptr, here, beside, first + n, J, D, P, BB, JT, DP, LANES
                )
            V = None
            if QUERY:
                V, ds = load_state(state, states, first + n, J, D, P, JT, DP, LANES, 2 * R)
            else:
                ds = load_vectors(state + D, vectors, first + n, J, D, P, JT, DP, LANES, 2 * R)
            b = b + (routing_logits(
                votes, V, logits_ptr, precision_ptr, prior_ptr, rows, beside, i, first + n, ls, here,
                MASKED, J, D, P, BB, JT, DP, LANES, WIDE, 0.0 if MODE == "none" else float("-inf")
            ),)
            s = None
            if s_ptr is not None:
                s_at = reread(s_ptr, i32, LANES > 0)
                if D % 4 == 0:
                    # s[t] is aligned as s is, whatever B. Else lanes would read 4 bytes, in a layout of their own.
                    s_at = tl.multiple_of(s_at, 16)
                s = load_vectors(s_at, vectors, first + n, J, D, P, JT, DP, LANES)
            dc = dc + (coupling_gradient(
                votes, s, ds, dcoupling_ptr, dmass_ptr, dsecond_ptr, rows, beside, i, first + n, cs, here,
                True, J, D, P, BB, JT, DP, LANES, WIDE
            ),)
            x = x + (votes,)
            valid = valid + (here,)
            if MODE == "in":
                # Read here, they take no registers between the input capsules, and have the layout of b at once.
                maximum = maximum + (load_numbers(reread(norm_ptr, i32, True), rows, known[n], first + n, J, JT),)
                inverses = inverses + (load_numbers(reread(inverse_ptr, i32, True), rows, known[n], first + n, J, JT),)
                if delta_ptr is None:
                    delta = delta + (tl.zeros([BB, JT], tl.float32),)
                else:
                    delta = delta + (load_numbers(reread(delta_ptr, i32, True), rows, known[n], first + n, J, JT),)
        c, _ = couple(b, rows_ptr, (maximum, inverses), rows, ok, i, B, I, NT, LEAKY, MODE)
        if activation_ptr is not None:
            dc = scaled(dc, per_input(activation_ptr, rows, ok, i, I), NT)
        db = agreement_gradient(c, dc, valid, MASKED, rows_ptr, delta, dlse_ptr, rows, ok, i, B, I, NT, MODE)
        sums = ()
        masses = ()
        seconds = ()
        for n in tl.static_range(NT):
            weighted = spread(db[n], BB, JT, DP, LANES) * x[n]
            sums = sums + (acc[n] + weighted,)
            if mass_ptr is not None:
                masses = masses + (mass[n] + db[n],)
            if second_ptr is not None:
                seconds = seconds + (second[n] + weighted * x[n],)
        acc = sums
        if mass_ptr is not None:
            mass = masses
        if second_ptr is not None:
            second = seconds

    plane = tl.cast(split, tl.int64) * B * J
    for n in tl.static_range(NT):
        store_vectors(partial_ptr + plane * D, acc[n], rows, inside, first + n, J, D, P, JT, DP, LANES)
        if mass_ptr is not None:
            store_numbers(mass_ptr + plane, mass[n], rows, once, first + n, J, JT)
        if second_ptr is not None:
            store_vectors(second_ptr + plane * D, second[n], rows, inside, first + n, J, D, P, JT, DP, LANES)
