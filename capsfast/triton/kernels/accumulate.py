"""One routing pass over the input capsules: partial sums of s in the forward, of G in the backward.

Program (batch tile, split, group) has BB samples, a slice of the input capsules and NT tiles of outputs. It keeps its
sums in registers and stores them as partial[split]. update.py adds the splits in a fixed order, so no sum depends on
the order in which programs run.
"""

import triton
import triton.language as tl

from .softmax import agreement_gradient, couple, finite_or_zero
from .tiles import (
    batch_rows,
    input_capsules,
    load_numbers,
    load_vectors,
    outputs,
    per_pair,
    routing_logits,
    score,
    spread,
    store_vectors,
    valid_inputs,
    valid_outputs,
    votes_tile,
)


@triton.jit(do_not_specialize=["B", "I", "chunk"], do_not_specialize_on_alignment=["rows_ptr"])
def accumulate_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    V_ptr,  # [B, J, D] float32
    rows_ptr,  # [3, B, I] float32, MODE "row_norm"
    partial_ptr,  # [splits, B, J, D] float32
    online_ptr,  # [2, splits, B, J] float32, out for MODE "in": maximum and sum of exponentials
    x_b, x_i, w_i, l_b, l_i, l_j, m_b, m_i, o_b, o_j,
    B, I, chunk,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, LEAKY: tl.constexpr, MODE: tl.constexpr,
):
    """MODE as in softmax.py, or "uniform": in the first pass without logits all couplings are equal and taken as 1."""
    rows = batch_rows(tl.program_id(0), BB, WIDE)
    split = tl.program_id(1)
    first = tl.program_id(2) * NT
    inside = rows[0] + rows[1] < B
    xs = (x_b, x_i, x_j, x_d)
    ws = (w_i, w_j, w_d, w_k)
    acc = ()
    V = ()
    known = ()
    maximum = ()
    total = ()
    for n in tl.static_range(NT):
        acc = acc + (tl.zeros([BB, JT * DP], tl.float32),)
        if MODE != "uniform":
            V = V + (load_vectors(V_ptr, rows, inside, first + n, J, D, JT, DP),)
            known = known + (valid_outputs(out_mask_ptr, rows, inside, first + n, o_b, o_j, J, JT, WIDE),)
        if MODE == "in":
            maximum = maximum + (tl.full([BB, JT], float("-inf"), tl.float32),)
            total = total + (tl.zeros([BB, JT], tl.float32),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        i = tl.cast(i32, tl.int64)
        ok = valid_inputs(mask_ptr, rows, inside, i, m_b, m_i)
        u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_ptr, rows, ok, i, 0, xs, K, KP, WIDE)
        if MODE == "uniform":
            sums = ()
            for n in tl.static_range(NT):
                sums = sums + (acc[n] + votes_tile(
                    u, x_ptr, w_ptr, mask_ptr, rows, ok, i, first + n, xs, ws, J, D, K,
                    BB, JT, DP, KP, VOTES, DOT, WIDE
                ),)
            acc = sums
        else:
            x = ()
            b = ()
            for n in tl.static_range(NT):
                votes = votes_tile(
                    u, x_ptr, w_ptr, mask_ptr, rows, ok, i, first + n, xs, ws, J, D, K,
                    BB, JT, DP, KP, VOTES, DOT, WIDE
                )
                valid = known[n] & ok[:, None]
                b = b + (routing_logits(
                    votes, V[n], logits_ptr, rows, i, first + n, (l_b, l_i, l_j), valid, BB, JT, DP, WIDE
                ),)
                x = x + (votes,)
            sums = ()
            if MODE == "in":
                # The online softmax over i: when the maximum grows, the sums so far are rescaled.
                maxima = ()
                totals = ()
                for n in tl.static_range(NT):
                    grown = tl.maximum(maximum[n], b[n])
                    least = finite_or_zero(grown)
                    scale = tl.exp(maximum[n] - least)
                    e = tl.exp(b[n] - least)
                    maxima = maxima + (grown,)
                    totals = totals + (total[n] * scale + e,)
                    sums = sums + (acc[n] * spread(scale, BB, JT, DP) + spread(e, BB, JT, DP) * x[n],)
                maximum = maxima
                total = totals
            else:
                c = couple(b, rows_ptr, (), rows, ok, i, B, I, NT, LEAKY, MODE)
                for n in tl.static_range(NT):
                    sums = sums + (acc[n] + spread(c[n], BB, JT, DP) * x[n],)
            acc = sums

    plane = tl.cast(split, tl.int64) * B * J
    for n in tl.static_range(NT):
        store_vectors(partial_ptr + plane * D, acc[n], rows, inside, first + n, J, D, JT, DP)
        if MODE == "in":
            j = outputs(first + n, JT, False)
            at = online_ptr + plane + rows[0] * J + (rows[1] * J)[:, None] + j[None, :]
            within = inside[:, None] & (j < J)[None, :]
            tl.store(at, maximum[n], mask=within)
            tl.store(at + tl.cast(tl.num_programs(1), tl.int64) * B * J, total[n], mask=within)


# These pointers are into [R, ...] tensors, so their alignment depends on B. Triton would compile a kernel for each.
@triton.jit(
    do_not_specialize=["B", "I", "chunk"],
    do_not_specialize_on_alignment=["rows_ptr", "norm_ptr", "inverse_ptr", "delta_ptr"],
)
def accumulate_gradient_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr, dcoupling_ptr,
    state_ptr,  # V and ds of this iteration in [B, J, R, 2, D] float32
    rows_ptr,  # [3, B, I] float32, MODE "row_norm"
    norm_ptr, inverse_ptr, delta_ptr,  # [B, J] float32, MODE "in"
    partial_ptr,  # [splits, B, J, D] float32
    x_b, x_i, w_i, l_b, l_i, l_j, m_b, m_i, o_b, o_j, d_b, d_i, d_j,
    B, I, chunk,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, LEAKY: tl.constexpr, MODE: tl.constexpr,
    R: tl.constexpr,
):
    """Partial sums of sum_i db votes, which one iteration adds to G."""
    rows = batch_rows(tl.program_id(0), BB, WIDE)
    split = tl.program_id(1)
    first = tl.program_id(2) * NT
    inside = rows[0] + rows[1] < B
    xs = (x_b, x_i, x_j, x_d)
    ws = (w_i, w_j, w_d, w_k)
    acc = ()
    known = ()
    maximum = ()
    inverses = ()
    delta = ()
    for n in tl.static_range(NT):
        acc = acc + (tl.zeros([BB, JT * DP], tl.float32),)
        pairs = valid_outputs(out_mask_ptr, rows, inside, first + n, o_b, o_j, J, JT, WIDE)
        known = known + (pairs,)
        if MODE == "in":
            maximum = maximum + (load_numbers(norm_ptr, rows, pairs, first + n, J, JT),)
            inverses = inverses + (load_numbers(inverse_ptr, rows, pairs, first + n, J, JT),)
            delta = delta + (load_numbers(delta_ptr, rows, pairs, first + n, J, JT),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        i = tl.cast(i32, tl.int64)
        ok = valid_inputs(mask_ptr, rows, inside, i, m_b, m_i)
        u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_ptr, rows, ok, i, 0, xs, K, KP, WIDE)
        x = ()
        b = ()
        dc = ()
        valid = ()
        for n in tl.static_range(NT):
            votes = votes_tile(
                u, x_ptr, w_ptr, mask_ptr, rows, ok, i, first + n, xs, ws, J, D, K, BB, JT, DP, KP, VOTES, DOT, WIDE
            )
            here = known[n] & ok[:, None]
            V = load_vectors(state_ptr, rows, inside, first + n, J, D, JT, DP, 2 * R)
            b = b + (routing_logits(votes, V, logits_ptr, rows, i, first + n, (l_b, l_i, l_j), here, BB, JT, DP, WIDE),)
            given = score(votes, load_vectors(state_ptr + D, rows, inside, first + n, J, D, JT, DP, 2 * R), BB, JT, DP)
            if dcoupling_ptr is not None:
                given += per_pair(dcoupling_ptr, rows, i, first + n, (d_b, d_i, d_j), here, JT, WIDE)
            x = x + (votes,)
            dc = dc + (given,)
            valid = valid + (here,)
        c = couple(b, rows_ptr, (maximum, inverses), rows, ok, i, B, I, NT, LEAKY, MODE)
        db = agreement_gradient(c, dc, valid, rows_ptr, delta, rows, ok, i, B, I, NT, MODE)
        sums = ()
        for n in tl.static_range(NT):
            sums = sums + (acc[n] + spread(db[n], BB, JT, DP) * x[n],)
        acc = sums

    for n in tl.static_range(NT):
        store_vectors(partial_ptr + tl.cast(split, tl.int64) * B * J * D, acc[n], rows, inside, first + n, J, D, JT, DP)
