"""One pass over the input capsules. The forward makes partial sums of s, or of the moments of a routing pass. The
backward makes partial sums of G, or the sums from which the gradients of query, precision, center and prior follow.

Program (batch tile, split, section) has BB samples, a slice of the input capsules and NT tiles of outputs. The program
keeps its sums in registers and stores them as partial[split]. update.py adds the splits in a fixed order, so no sum
depends on the order in which programs run.
"""

import triton
import triton.language as tl

from .arguments import KernelInputs, Norms, OutputGradients
from .begin import begin
from .softmax import agreement_gradient, couple, exponential, finite_or_zero, log_sum_exp, scaled
from .tiles import batch_rows, first_tile, per_input, store_coefficients, store_pairs, valid_outputs, where_valid, zeros
from .vectors import load_state, load_vectors, reread_tiles, spread, store_numbers, store_vectors, vector_tile
from .votes import coupling_gradient, input_capsule, reread, routing_logits, votes_about_center


@triton.jit
def add_tile(b_sums, b_next, n, b_scale, b_c, b_x, p_mass, p_second, T: tl.constexpr, RESCALED: tl.constexpr = False):
    """Appends tile n to b_next: the sums over i of c x and, if wanted, of c and c x^2. b_sums: the sums so far; if
    RESCALED, they are multiplied by b_scale. b_c, b_scale: [BB, JT]."""
    b_weighted = spread(b_c, T) * b_x
    b_first = b_next[0] + ((b_sums[0][n] * spread(b_scale, T) if RESCALED else b_sums[0][n]) + b_weighted,)
    b_mass = b_next[1]
    if p_mass is not None:
        b_mass = b_mass + ((b_sums[1][n] * b_scale if RESCALED else b_sums[1][n]) + b_c,)
    b_second = b_next[2]
    if p_second is not None:
        b_second = b_second + ((b_sums[2][n] * spread(b_scale, T) if RESCALED else b_sums[2][n]) + b_weighted * b_x,)
    return b_first, b_mass, b_second


@triton.jit
def no_sums(p_mass, p_second, T: tl.constexpr):
    b_first = zeros(T.JT * T.DP, T)
    b_mass = ()
    if p_mass is not None:
        b_mass = zeros(T.JT, T)
    b_second = ()
    if p_second is not None:
        b_second = zeros(T.JT * T.DP, T)
    return b_first, b_mass, b_second


@triton.jit
def store_sums(p_partial, p_mass, p_second, b_sums, rows, n0, plane, T: tl.constexpr):
    for n in tl.static_range(T.NT):
        store_vectors(p_partial + plane * T.D, b_sums[0][n], rows, n0 + n, T)
        if p_mass is not None:
            store_numbers(p_mass + plane, b_sums[1][n], rows, n0 + n, T)
        if p_second is not None:
            store_vectors(p_second + plane * T.D, b_sums[2][n], rows, n0 + n, T)


# These pointers point into [R, ...] tensors, so their alignment depends on B: Triton would compile a kernel for each.
@triton.jit(do_not_specialize=["B", "I", "chunk"], do_not_specialize_on_alignment=["p_norm", "p_inverse"])
def accumulate_kernel(
    p_x, p_w, p_logits, p_mask, p_out_mask,
    p_precision, p_center, p_prior, p_activation,
    p_V,  # float32 vectors, see strips.py, if QUERY
    p_rows, p_norm, p_inverse,  # see arguments.Norms; MODE "in" has norms in its second pass only, after all sums
    p_partial,  # [splits, B, J, D] float32, out: sum_i c x, or None in the second pass of MODE "in"
    p_online,  # [2, splits, B, J] float32, out for MODE "in": maximum and sum of exponentials
    p_mass,  # [splits, B, J] float32, out: sum_i c, or None
    p_second,  # [splits, B, J, D] float32, out: sum_i c x^2, or None
    p_coupling,  # [B, I, J], out, or None; MODE "in" fills it in the second pass only, "uniform" never
    p_lse,  # [B, I] float32, out for MODE "out": log-sum-exp, or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,  # for votes with positions, else None
    B, I, chunk,
    T: tl.constexpr, MODE: tl.constexpr, KEPT: tl.constexpr, TOGETHER: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """MODE as in softmax.py, or "uniform": in the first pass without logits all couplings are equal and taken as 1.

    KEPT: V is read once, otherwise again for every input capsule. TOGETHER: how many input capsules are taken as one,
    see KernelCall.merged(). The activation multiplies c.
    """
    begin(PDL)
    SUMS: tl.constexpr = p_partial is not None
    ONLINE: tl.constexpr = MODE == "in" and SUMS
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = KernelInputs(
        p_x, p_w, p_logits, p_mask, p_out_mask, p_precision, p_center, p_prior, p_activation,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump, TOGETHER
    )
    rows = batch_rows(tl.program_id(0), inputs, T)
    split = tl.program_id(1)
    n0 = first_tile(tl.program_id(2), T)
    o_vectors = vector_tile(rows, T)
    b_sums = ()
    if SUMS:
        b_sums = no_sums(p_mass, p_second, T)
    b_V = ()
    m_outputs = ()
    b_max = ()
    b_total = ()
    for n in tl.static_range(T.NT):
        if MODE != "uniform":
            if T.QUERY and KEPT:
                b_V = b_V + (load_vectors(p_V, o_vectors, n0 + n, T),)
            m_outputs = m_outputs + (valid_outputs(p_out_mask, rows, rows.m_rows, n0 + n, T),)
        if ONLINE:
            b_max = b_max + (tl.full([T.BB, T.JT], float("-inf"), tl.float32),)
            b_total = b_total + (tl.zeros([T.BB, T.JT], tl.float32),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        capsule = input_capsule(inputs, rows, i32, T, w_i == 0)
        o_again = reread_tiles(o_vectors, i32, T)
        b_a = per_input(p_activation, rows, capsule.m_rows, capsule.i, inputs) if p_activation is not None else None
        b_x = ()
        b_logits = ()
        b_next = ((), (), ())
        for n in tl.static_range(T.NT):
            m_capsule = capsule.m_rows[:, None]
            m_pairs = tl.broadcast_to(m_capsule, [T.BB, T.JT]) if MODE == "uniform" else m_outputs[n] & m_capsule
            b_x_n = votes_about_center(inputs, rows, o_again, capsule, n0 + n, m_pairs, T)
            if MODE == "uniform":
                b_ones = tl.full([T.BB, T.JT], 1.0, tl.float32)
                if p_activation is not None:
                    b_ones *= b_a[:, None]
                elif p_mass is not None:
                    b_ones *= capsule.m_rows.to(tl.float32)[:, None]
                b_next = add_tile(b_sums, b_next, n, None, b_ones, b_x_n, p_mass, p_second, T)
            else:
                b_V_n = b_V[n] if KEPT and T.QUERY else b_x_n
                if T.QUERY and not KEPT:
                    b_V_n = load_vectors(reread(p_V, i32, True), o_vectors, n0 + n, T)
                b_logits = b_logits + (routing_logits(
                    inputs, b_x_n, b_V_n, rows, o_again, capsule, n0 + n, m_pairs, T,
                    0.0 if MODE == "none" else float("-inf")
                ),)
                b_x = b_x + (b_x_n,)
        if ONLINE:
            # The online softmax over i: when the maximum grows, the sums so far are rescaled.
            b_maxima = ()
            b_totals = ()
            for n in tl.static_range(T.NT):
                b_new_max = tl.maximum(b_max[n], b_logits[n])
                b_shift = finite_or_zero(b_new_max)
                b_scale = exponential(b_max[n] - b_shift)
                b_exp = exponential(b_logits[n] - b_shift)
                b_maxima = b_maxima + (b_new_max,)
                b_totals = b_totals + (b_total[n] * b_scale + b_exp,)
                if p_activation is not None:
                    b_exp *= b_a[:, None]
                b_next = add_tile(b_sums, b_next, n, b_scale, b_exp, b_x[n], p_mass, p_second, T, True)
            b_max = b_maxima
            b_total = b_totals
        elif MODE != "uniform":
            norms = Norms(p_rows, p_norm, p_inverse)
            b_c, b_row_max, b_scale = couple(b_logits, norms, inputs, rows, capsule, m_outputs, n0, T, MODE)
            if p_lse is not None:
                p_lse_i = p_lse + (rows.start * I + capsule.i) + rows.o_b * I
                tl.store(p_lse_i, log_sum_exp(b_row_max, b_scale), mask=rows.m_once)
            if p_activation is not None:
                b_c = scaled(b_c, b_a, T)
            for n in tl.static_range(T.NT):
                if SUMS:
                    b_next = add_tile(b_sums, b_next, n, None, b_c[n], b_x[n], p_mass, p_second, T)
                if p_coupling is not None:
                    store_pairs(p_coupling, b_c[n], inputs, rows, capsule.i, n0 + n, T)
        if SUMS:
            b_sums = b_next

    plane = tl.cast(split, tl.int64) * B * T.J
    if SUMS:
        store_sums(p_partial, p_mass, p_second, b_sums, rows, n0, plane, T)
    if ONLINE:
        p_totals = p_online + plane + tl.cast(tl.num_programs(1), tl.int64) * B * T.J
        for n in tl.static_range(T.NT):
            store_numbers(p_online + plane, b_max[n], rows, n0 + n, T)
            store_numbers(p_totals, b_total[n], rows, n0 + n, T)


@triton.jit(
    do_not_specialize=["B", "I", "chunk"],
    do_not_specialize_on_alignment=["p_norm", "p_inverse", "p_delta", "p_pairs"],
)
def accumulate_gradient_kernel(
    p_x, p_w, p_logits, p_mask, p_out_mask,
    p_precision, p_center, p_prior, p_activation,
    p_dcoupling, p_dmass, p_dsecond, p_dlse,
    p_state,  # V and ds of this iteration in a state of R; precision, center, dsecond: also one of R
    p_rows,  # see arguments.Norms, of this iteration
    p_norm, p_inverse, p_delta, p_s,  # see arguments.Norms, of this iteration, for MODE "in"
    p_pairs,  # [B, I, J, 2] float32, out: c, with the activation, and db; or None
    p_terms,  # [B, I, J] float32, out: c dc without the activation, a term of the activation's gradient; or None
    p_partial,  # [splits, B, J, D] float32, out: sum_i db x, or None if no sums are wanted
    p_mass,  # [splits, B, J] float32, out: sum_i db, or None
    p_second,  # [splits, B, J, D] float32, out: sum_i db x^2, or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk,
    T: tl.constexpr, MODE: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr = False,
):
    """Computes the coefficients c and db of one iteration in dvotes, and partial sums over i: db votes, which G adds
    up, and for a pass also db and db votes^2."""
    begin(PDL)
    SUMS: tl.constexpr = p_partial is not None
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = KernelInputs(
        p_x, p_w, p_logits, p_mask, p_out_mask, p_precision, p_center, p_prior, p_activation,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump
    )
    douts = OutputGradients(p_dcoupling, p_dmass, p_dsecond, p_dlse)
    rows = batch_rows(tl.program_id(0), inputs, T)
    split = tl.program_id(1)
    n0 = first_tile(tl.program_id(2), T)
    o_vectors = vector_tile(rows, T)
    o_states = vector_tile(rows, T, 2)
    b_sums = ()
    if SUMS:
        b_sums = no_sums(p_mass, p_second, T)
    m_outputs = ()
    for n in tl.static_range(T.NT):
        m_outputs = m_outputs + (valid_outputs(None, rows, rows.m_rows, n0 + n, T),)

    lo = split * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        capsule = input_capsule(inputs, rows, i32, T, w_i == 0)
        o_again = reread_tiles(o_vectors, i32, T)
        # Reading here keeps no registers between input capsules, and the numbers have the layout of b at once.
        norms = Norms(
            p_rows,
            None if p_norm is None else reread(p_norm, i32, True),
            None if p_inverse is None else reread(p_inverse, i32, True),
            None if p_delta is None else reread(p_delta, i32, True),
            None if p_s is None else reread(p_s, i32, T.LANES > 0),
        )
        p_state_i = reread(p_state, i32, T.LANES > 0)
        b_x = ()
        m_pairs = ()
        b_logits = ()
        b_dc = ()
        for n in tl.static_range(T.NT):
            m_outputs_n = m_outputs[n]
            if p_out_mask is not None:
                # Keeping the mask, as the forward does, would take registers that are scarce here.
                m_outputs_n = valid_outputs(reread(p_out_mask, i32, True), rows, rows.m_rows, n0 + n, T)
            m_pairs = m_pairs + (m_outputs_n & capsule.m_rows[:, None],)
            b_x = b_x + (votes_about_center(inputs, rows, o_again, capsule, n0 + n, m_pairs[n], T, R),)
            b_V, b_ds = load_state(p_state_i, o_again, o_states, n0 + n, T, 2 * R)
            b_logits = b_logits + (routing_logits(
                inputs, b_x[n], b_V, rows, o_again, capsule, n0 + n, m_pairs[n], T,
                0.0 if MODE == "none" else float("-inf"), R
            ),)
            b_s = None if norms.s is None else load_vectors(norms.s, o_again, n0 + n, T, R)
            b_dc = b_dc + (
                coupling_gradient(inputs, douts, b_x[n], b_s, b_ds, rows, o_again, capsule, n0 + n, m_pairs[n], T, R),
            )
        b_c, _, _ = couple(b_logits, norms, inputs, rows, capsule, m_outputs, n0, T, MODE)
        if p_terms is not None:
            for n in tl.static_range(T.NT):
                b_term = where_valid(m_pairs[n], b_c[n] * b_dc[n], 0.0, T.MASKED)
                store_pairs(p_terms, b_term, inputs, rows, capsule.i, n0 + n, T)
        b_a = None
        if p_activation is not None:
            b_a = per_input(p_activation, rows, capsule.m_rows, capsule.i, inputs)
            b_dc = scaled(b_dc, b_a, T)
        b_db = agreement_gradient(b_c, b_dc, m_pairs, norms, douts.dlse, inputs, rows, capsule, m_outputs, n0, T, MODE)
        if p_pairs is not None:
            if b_a is not None:
                b_c = scaled(b_c, b_a, T)
            for n in tl.static_range(T.NT):
                store_coefficients(p_pairs, b_c[n], b_db[n], inputs, rows, capsule.i, n0 + n, T)
        if SUMS:
            b_next = ((), (), ())
            for n in tl.static_range(T.NT):
                b_next = add_tile(b_sums, b_next, n, None, b_db[n], b_x[n], p_mass, p_second, T)
            b_sums = b_next

    if SUMS:
        plane = tl.cast(split, tl.int64) * B * T.J
        store_sums(p_partial, p_mass, p_second, b_sums, rows, n0, plane, T)
