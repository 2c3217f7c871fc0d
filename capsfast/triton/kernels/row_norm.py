"""Two more passes: row_norm, for a softmax over more outputs than a program holds, and the one that writes c of a
softmax over the input capsules."""

import triton
import triton.language as tl

from .softmax import couple, exponential, finite_or_zero, inverse, scaled
from .tiles import (
    batch_rows,
    first_tile,
    of_batch,
    per_input,
    store_pairs,
    valid_inputs,
    valid_outputs,
    valid_rows,
    where_valid,
)
from .vectors import centered, load_numbers, load_vectors, vector_tile
from .votes import coupling_gradient, input_capsules, reread, routing_logits, votes_tile


@triton.jit(do_not_specialize=["B", "I", "chunk", "groups"], do_not_specialize_on_alignment=["rows_ptr"])
def row_norm_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,  # of a pass: float32 [B, J, D] twice, [B, J], [B, I], or None
    dcoupling_ptr,
    dmass_ptr, dsecond_ptr, dlse_ptr,  # of a pass: float32 [B, J], [B, J, D], [B, I], or None
    state_ptr,  # V [B, J, D] float32, or if WITH_DS points to V and ds of this iteration in [B, J, R, 2, D]
    rows_ptr,  # [3, B, I] float32, out
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,  # of votes with positions, or None
    B, I, chunk, groups,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, SHARED_LOGITS: tl.constexpr, LEAKY: tl.constexpr,
    QUERY: tl.constexpr, QUADRATIC: tl.constexpr, MASKED: tl.constexpr, WITH_DS: tl.constexpr, R: tl.constexpr,
):
    """Maximum and 1 / sum of every row (b, i) of logits and, if WITH_DS, sum_j c dc. Takes the outputs tile by tile.

    Program (batch tile, split) has BB samples and a slice of the input capsules.
    """
    rows = batch_rows(tl.program_id(0), B, positions, BB, PP, WIDE)
    inside, once = valid_rows(rows, P)
    vectors = vector_tile(rows, inside, J, D, P, JT, DP, LANES)
    C: tl.constexpr = D // P
    xs = (x_b, x_i, x_j, x_d) if positions is None else (x_b, s_i, s_j, s_d)
    x_ptr = of_batch(x_ptr, rows, positions, x_jump)
    ws = (w_i, w_j, w_d, w_k)
    ls = (I, positions, SHARED_LOGITS, False)
    cs = (I, positions, False, False)
    S: tl.constexpr = 2 * R if WITH_DS else 1
    plane = tl.cast(B, tl.int64) * I
    lo = tl.program_id(1) * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        i = tl.cast(i32, tl.int64)
        ok = valid_inputs(mask_ptr, rows, inside, i, I)
        w_at = w_ptr
        if not VOTES:
            w_at = reread(w_ptr, i32, w_i == 0 and J * D * K > 4096)
        u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_ptr, rows, ok, i, 0, xs, K, KP, WIDE)
        # If LEAKY, there is one more entry, of logit 0.
        m = tl.full([BB], 0.0 if LEAKY else float("-inf"), tl.float32)
        total = tl.full([BB], 1.0 if LEAKY else 0.0, tl.float32)
        inner = tl.zeros([BB], tl.float32)
        for n in range(groups * NT):
            x = votes_tile(
                u, x_ptr, w_at, mask_ptr, rows, ok, i, n, xs, ws, J, C, K,
                BB, JT, DP, LANES, KP, VOTES, DOT, WIDE
            )
            valid = valid_outputs(out_mask_ptr, rows, ok, n, J, JT)
            if QUADRATIC:
                x = centered(x, center_ptr, mask_ptr, out_mask_ptr, valid, vectors, n, J, D, P, BB, JT, DP, LANES)
            V = load_vectors(state_ptr, vectors, n, J, D, P, JT, DP, LANES, S) if QUERY else None
            b = routing_logits(
                x, V, logits_ptr, precision_ptr, prior_ptr, rows, vectors, i, n, ls, valid, MASKED,
                J, D, P, BB, JT, DP, LANES, WIDE
            )
            grown = tl.maximum(m, tl.max(b, 1))
            least = finite_or_zero(grown)
            scale = exponential(m - least)
            e = exponential(b - least[:, None])
            total = total * scale + tl.sum(e, 1)
            if WITH_DS:
                ds = load_vectors(state_ptr + D, vectors, n, J, D, P, JT, DP, LANES, S)
                dc = coupling_gradient(
                    x, None, ds, dcoupling_ptr, dmass_ptr, dsecond_ptr, rows, vectors, i, n, cs, valid,
                    True, J, D, P, BB, JT, DP, LANES, WIDE
                )
                inner = inner * scale + tl.sum(where_valid(valid, e * dc, 0.0, MASKED), 1)
            m = grown
        at = rows_ptr + (rows[0] * I + i) + rows[1] * I
        scale = inverse(total)
        tl.store(at, finite_or_zero(m), mask=once)
        tl.store(at + plane, scale, mask=once)
        if WITH_DS:
            if activation_ptr is not None:
                inner *= per_input(activation_ptr, rows, ok, i, I)
            if dlse_ptr is not None:
                inner -= per_input(dlse_ptr, rows, ok, i, I) * total
            tl.store(at + 2 * plane, inner * scale, mask=once)


@triton.jit(
    do_not_specialize=["B", "I", "chunk"], do_not_specialize_on_alignment=["norm_ptr", "inverse_ptr"]
)
def coupling_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,  # of a pass: float32 [B, J, D] twice, [B, J], [B, I], or None
    V_ptr,  # [B, J, D] float32, if QUERY
    norm_ptr, inverse_ptr,  # [B, J] float32
    coupling_ptr,  # [B, I, J], out
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,  # of votes with positions, or None
    B, I, chunk,
    x_j: tl.constexpr, x_d: tl.constexpr, w_j: tl.constexpr, w_d: tl.constexpr, w_k: tl.constexpr,
    J: tl.constexpr, D: tl.constexpr, K: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BB: tl.constexpr, JT: tl.constexpr, DP: tl.constexpr, LANES: tl.constexpr, KP: tl.constexpr, NT: tl.constexpr,
    VOTES: tl.constexpr, DOT: tl.constexpr, WIDE: tl.constexpr, SHARED_LOGITS: tl.constexpr, LEAKY: tl.constexpr,
    QUERY: tl.constexpr, QUADRATIC: tl.constexpr, MASKED: tl.constexpr,
):
    """Programs are cut as in accumulate.py."""
    rows = batch_rows(tl.program_id(0), B, positions, BB, PP, WIDE)
    first = first_tile(tl.program_id(2), J, JT, NT)
    inside, once = valid_rows(rows, P)
    vectors = vector_tile(rows, inside, J, D, P, JT, DP, LANES)
    C: tl.constexpr = D // P
    xs = (x_b, x_i, x_j, x_d) if positions is None else (x_b, s_i, s_j, s_d)
    x_ptr = of_batch(x_ptr, rows, positions, x_jump)
    ws = (w_i, w_j, w_d, w_k)
    ls = (I, positions, SHARED_LOGITS, NT * JT < J)
    cs = (I, positions, False, NT * JT < J)
    maximum = ()
    inverses = ()
    for n in tl.static_range(NT):
        pairs = valid_outputs(out_mask_ptr, rows, inside, first + n, J, JT)
        maximum = maximum + (load_numbers(norm_ptr, rows, pairs, first + n, J, JT),)
        inverses = inverses + (load_numbers(inverse_ptr, rows, pairs, first + n, J, JT),)
    lo = tl.program_id(1) * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        i = tl.cast(i32, tl.int64)
        ok = valid_inputs(mask_ptr, rows, inside, i, I)
        w_at = w_ptr
        if not VOTES:
            w_at = reread(w_ptr, i32, w_i == 0 and J * D * K > 4096)
        u = tl.zeros([1], tl.float32) if VOTES else input_capsules(x_ptr, rows, ok, i, 0, xs, K, KP, WIDE)
        b = ()
        for n in tl.static_range(NT):
            x = votes_tile(
                u, x_ptr, w_at, mask_ptr, rows, ok, i, first + n, xs, ws, J, C, K,
                BB, JT, DP, LANES, KP, VOTES, DOT, WIDE
            )
            valid = valid_outputs(out_mask_ptr, rows, ok, first + n, J, JT)
            if QUADRATIC:
                x = centered(
                    x, center_ptr, mask_ptr, out_mask_ptr, valid, vectors, first + n, J, D, P, BB, JT, DP, LANES
                )
            V = load_vectors(V_ptr, vectors, first + n, J, D, P, JT, DP, LANES) if QUERY else None
            b = b + (routing_logits(
                x, V, logits_ptr, precision_ptr, prior_ptr, rows, vectors, i, first + n, ls, valid, MASKED,
                J, D, P, BB, JT, DP, LANES, WIDE
            ),)
        c, _ = couple(b, None, (maximum, inverses), rows, ok, i, B, I, NT, LEAKY, "in")
        if activation_ptr is not None:
            c = scaled(c, per_input(activation_ptr, rows, ok, i, I), NT)
        for n in tl.static_range(NT):
            store_pairs(coupling_ptr, c[n], rows, once, i, first + n, cs, J, JT, WIDE)
