"""One pass over the input capsules. The forward makes partial sums of s, or of the moments of a routing pass. The
backward makes partial sums of G, or the sums from which the gradients of query, precision, center and prior follow.

Program (batch tile, split, group) has BB samples, a slice of the input capsules and NT tiles of outputs. The program
keeps its sums in registers and stores them as partial[split]. update.py adds the splits in a fixed order, so no sum
depends on the order in which programs run.
"""

import triton
import triton.language as tl

from .arguments import Given, Inputs, Norms
from .begin import begin
from .softmax import agreement_gradient, couple, exponential, finite_or_zero, log_sum_exp, scaled
from .tiles import batch_rows, first_tile, per_input, store_coefficients, store_pairs, valid_outputs, where_valid, zeros
from .vectors import load_state, load_vectors, reread_tiles, spread, store_numbers, store_vectors, vector_tile
from .votes import coupling_gradient, input_capsule, reread, routing_logits, votes_about_center


@triton.jit
def add_tile(sums, more, n, scale, weight, x, mass_ptr, second_ptr, T: tl.constexpr, RESCALED: tl.constexpr = False):
    """Appends tile n of the next sums to more. The sums are over i of w x and, if wanted, of w and w x^2, NT tiles
    each. If RESCALED, the sums so far are multiplied by scale. weight, scale: [BB, JT]."""
    weighted = spread(weight, T) * x
    first = more[0] + ((sums[0][n] * spread(scale, T) if RESCALED else sums[0][n]) + weighted,)
    mass = more[1]
    if mass_ptr is not None:
        mass = mass + ((sums[1][n] * scale if RESCALED else sums[1][n]) + weight,)
    second = more[2]
    if second_ptr is not None:
        second = second + ((sums[2][n] * spread(scale, T) if RESCALED else sums[2][n]) + weighted * x,)
    return first, mass, second


@triton.jit
def no_sums(mass_ptr, second_ptr, T: tl.constexpr):
    first = zeros(T.JT * T.DP, T)
    mass = ()
    if mass_ptr is not None:
        mass = zeros(T.JT, T)
    second = ()
    if second_ptr is not None:
        second = zeros(T.JT * T.DP, T)
    return first, mass, second


@triton.jit
def store_sums(partial_ptr, mass_ptr, second_ptr, sums, rows, first, plane, T: tl.constexpr):
    for n in tl.static_range(T.NT):
        store_vectors(partial_ptr + plane * T.D, sums[0][n], rows, first + n, T)
        if mass_ptr is not None:
            store_numbers(mass_ptr + plane, sums[1][n], rows, first + n, T)
        if second_ptr is not None:
            store_vectors(second_ptr + plane * T.D, sums[2][n], rows, first + n, T)


# These pointers point into [R, ...] tensors, so their alignment depends on B: Triton would compile a kernel for each.
@triton.jit(
    do_not_specialize=["B", "I", "chunk"], do_not_specialize_on_alignment=["norm_ptr", "inverse_ptr"]
)
def accumulate_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,
    V_ptr,  # float32 vectors, see strips.py, if QUERY
    rows_ptr, norm_ptr, inverse_ptr,  # see arguments.Norms; MODE "in" knows norms after all sums, for a second pass
    partial_ptr,  # [splits, B, J, D] float32, out: sum_i c x, or None in the second pass of MODE "in"
    online_ptr,  # [2, splits, B, J] float32, out for MODE "in": maximum and sum of exponentials
    mass_ptr,  # [splits, B, J] float32, out: sum_i c, or None
    second_ptr,  # [splits, B, J, D] float32, out: sum_i c x^2, or None
    coupling_ptr,  # [B, I, J], out, or None; MODE "in" fills it in the second pass only, "uniform" never
    lse_ptr,  # [B, I] float32, out for MODE "out": log-sum-exp, or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,  # for votes with positions, else None
    B, I, chunk,
    T: tl.constexpr, MODE: tl.constexpr, KEPT: tl.constexpr, TOGETHER: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """MODE as in softmax.py, or "uniform": in the first pass without logits all couplings are equal and taken as 1.

    KEPT: V is read once, otherwise again for every input capsule. TOGETHER: how many input capsules are taken as one,
    see Call.merged(). The activation multiplies c.
    """
    begin(PDL)
    SUMS: tl.constexpr = partial_ptr is not None
    ONLINE: tl.constexpr = MODE == "in" and SUMS
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = Inputs(
        x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr, precision_ptr, center_ptr, prior_ptr, activation_ptr,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump, TOGETHER
    )
    rows = batch_rows(tl.program_id(0), inputs, T)
    split = tl.program_id(1)
    first = first_tile(tl.program_id(2), T)
    vectors = vector_tile(rows, T)
    sums = ()
    if SUMS:
        sums = no_sums(mass_ptr, second_ptr, T)
    V = ()
    known = ()
    maximum = ()
    total = ()
    for n in tl.static_range(T.NT):
        if MODE != "uniform":
            if T.QUERY and KEPT:
                V = V + (load_vectors(V_ptr, vectors, first + n, T),)
            known = known + (valid_outputs(out_mask_ptr, rows, rows.inside, first + n, T),)
        if ONLINE:
            maximum = maximum + (tl.full([T.BB, T.JT], float("-inf"), tl.float32),)
            total = total + (tl.zeros([T.BB, T.JT], tl.float32),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        here = input_capsule(inputs, rows, i32, T, w_i == 0)
        beside = reread_tiles(vectors, i32, T)
        a = per_input(activation_ptr, rows, here.ok, here.i, inputs) if activation_ptr is not None else None
        x = ()
        b = ()
        more = ((), (), ())
        for n in tl.static_range(T.NT):
            ok = here.ok[:, None]
            valid = tl.broadcast_to(ok, [T.BB, T.JT]) if MODE == "uniform" else known[n] & ok
            x_n = votes_about_center(inputs, rows, beside, here, first + n, valid, T)
            if MODE == "uniform":
                c0 = tl.full([T.BB, T.JT], 1.0, tl.float32)
                if activation_ptr is not None:
                    c0 *= a[:, None]
                elif mass_ptr is not None:
                    c0 *= here.ok.to(tl.float32)[:, None]
                more = add_tile(sums, more, n, None, c0, x_n, mass_ptr, second_ptr, T)
            else:
                V_n = V[n] if KEPT and T.QUERY else x_n
                if T.QUERY and not KEPT:
                    V_n = load_vectors(reread(V_ptr, i32, True), vectors, first + n, T)
                b = b + (routing_logits(
                    inputs, x_n, V_n, rows, beside, here, first + n, valid, T, 0.0 if MODE == "none" else float("-inf")
                ),)
                x = x + (x_n,)
        if ONLINE:
            # The online softmax over i: when the maximum grows, the sums so far are rescaled.
            maxima = ()
            totals = ()
            for n in tl.static_range(T.NT):
                grown = tl.maximum(maximum[n], b[n])
                least = finite_or_zero(grown)
                scale = exponential(maximum[n] - least)
                e = exponential(b[n] - least)
                maxima = maxima + (grown,)
                totals = totals + (total[n] * scale + e,)
                if activation_ptr is not None:
                    e *= a[:, None]
                more = add_tile(sums, more, n, scale, e, x[n], mass_ptr, second_ptr, T, True)
            maximum = maxima
            total = totals
        elif MODE != "uniform":
            norms = Norms(rows_ptr, norm_ptr, inverse_ptr)
            c, m, scale = couple(b, norms, inputs, rows, here, known, first, T, MODE)
            if lse_ptr is not None:
                at = lse_ptr + (rows.first * I + here.i) + rows.local * I
                tl.store(at, log_sum_exp(m, scale), mask=rows.once)
            if activation_ptr is not None:
                c = scaled(c, a, T)
            for n in tl.static_range(T.NT):
                if SUMS:
                    more = add_tile(sums, more, n, None, c[n], x[n], mass_ptr, second_ptr, T)
                if coupling_ptr is not None:
                    store_pairs(coupling_ptr, c[n], inputs, rows, here.i, first + n, T)
        if SUMS:
            sums = more

    plane = tl.cast(split, tl.int64) * B * T.J
    if SUMS:
        store_sums(partial_ptr, mass_ptr, second_ptr, sums, rows, first, plane, T)
    if ONLINE:
        totals_ptr = online_ptr + plane + tl.cast(tl.num_programs(1), tl.int64) * B * T.J
        for n in tl.static_range(T.NT):
            store_numbers(online_ptr + plane, maximum[n], rows, first + n, T)
            store_numbers(totals_ptr, total[n], rows, first + n, T)


@triton.jit(
    do_not_specialize=["B", "I", "chunk"],
    do_not_specialize_on_alignment=["norm_ptr", "inverse_ptr", "delta_ptr", "pairs_ptr"],
)
def accumulate_gradient_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,
    dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr,
    state_ptr,  # V and ds of this iteration, of a state of R iterations
    rows_ptr,  # see arguments.Norms, of this iteration
    norm_ptr, inverse_ptr, delta_ptr, s_ptr,  # see arguments.Norms, of this iteration, for MODE "in"
    pairs_ptr,  # [B, I, J, 2] float32, out: c, with the activation, and db; or None
    terms_ptr,  # [B, I, J] float32, out: c dc without the activation, a term of the activation's gradient; or None
    partial_ptr,  # [splits, B, J, D] float32, out: sum_i db x, or None if no sums are wanted
    mass_ptr,  # [splits, B, J] float32, out: sum_i db, or None
    second_ptr,  # [splits, B, J, D] float32, out: sum_i db x^2, or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk,
    T: tl.constexpr, MODE: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr = False,
):
    """Computes the coefficients c and db of one iteration in dvotes, and partial sums over i: db votes, which G adds
    up, and for a pass also db and db votes^2."""
    begin(PDL)
    SUMS: tl.constexpr = partial_ptr is not None
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = Inputs(
        x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr, precision_ptr, center_ptr, prior_ptr, activation_ptr,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump
    )
    given = Given(dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr)
    rows = batch_rows(tl.program_id(0), inputs, T)
    split = tl.program_id(1)
    first = first_tile(tl.program_id(2), T)
    vectors = vector_tile(rows, T)
    states = vector_tile(rows, T, 2)
    sums = ()
    if SUMS:
        sums = no_sums(mass_ptr, second_ptr, T)
    known = ()
    for n in tl.static_range(T.NT):
        known = known + (valid_outputs(None, rows, rows.inside, first + n, T),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        here = input_capsule(inputs, rows, i32, T, w_i == 0)
        beside = reread_tiles(vectors, i32, T)
        # Reading here keeps no registers between input capsules, and the numbers have the layout of b at once.
        norms = Norms(
            rows_ptr,
            None if norm_ptr is None else reread(norm_ptr, i32, True),
            None if inverse_ptr is None else reread(inverse_ptr, i32, True),
            None if delta_ptr is None else reread(delta_ptr, i32, True),
            None if s_ptr is None else reread(s_ptr, i32, T.LANES > 0),
        )
        state_at = reread(state_ptr, i32, T.LANES > 0)
        x = ()
        valid = ()
        b = ()
        dc = ()
        for n in tl.static_range(T.NT):
            outputs = known[n]
            if out_mask_ptr is not None:
                # Keeping the mask, as the forward does, would take registers that are scarce here.
                outputs = valid_outputs(reread(out_mask_ptr, i32, True), rows, rows.inside, first + n, T)
            valid = valid + (outputs & here.ok[:, None],)
            x = x + (votes_about_center(inputs, rows, beside, here, first + n, valid[n], T),)
            V, ds = load_state(state_at, beside, states, first + n, T, 2 * R)
            b = b + (routing_logits(
                inputs, x[n], V, rows, beside, here, first + n, valid[n], T, 0.0 if MODE == "none" else float("-inf")
            ),)
            s = None if norms.s is None else load_vectors(norms.s, beside, first + n, T, R)
            dc = dc + (coupling_gradient(inputs, given, x[n], s, ds, rows, beside, here, first + n, valid[n], T),)
        c, _, _ = couple(b, norms, inputs, rows, here, known, first, T, MODE)
        if terms_ptr is not None:
            for n in tl.static_range(T.NT):
                term = where_valid(valid[n], c[n] * dc[n], 0.0, T.MASKED)
                store_pairs(terms_ptr, term, inputs, rows, here.i, first + n, T)
        a = None
        if activation_ptr is not None:
            a = per_input(activation_ptr, rows, here.ok, here.i, inputs)
            dc = scaled(dc, a, T)
        db = agreement_gradient(c, dc, valid, norms, given.dlse, inputs, rows, here, known, first, T, MODE)
        if pairs_ptr is not None:
            if a is not None:
                c = scaled(c, a, T)
            for n in tl.static_range(T.NT):
                store_coefficients(pairs_ptr, c[n], db[n], inputs, rows, here.i, first + n, T)
        if SUMS:
            more = ((), (), ())
            for n in tl.static_range(T.NT):
                more = add_tile(sums, more, n, None, db[n], x[n], mass_ptr, second_ptr, T)
            sums = more

    if SUMS:
        plane = tl.cast(split, tl.int64) * B * T.J
        store_sums(partial_ptr, mass_ptr, second_ptr, sums, rows, first, plane, T)
