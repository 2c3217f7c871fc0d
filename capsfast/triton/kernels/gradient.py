"""The gradient pass: dvotes = sum_t c_t ds_t + db_t V_t, and from it du and dW.

Iteration t scored the votes with V_t; t counts from 0, so V_0 = 0. accumulate_gradient stored the coefficients c_t and
db_t. Program (split, chunk) has the input capsules of its chunk and the batch tiles of its split. No other program
writes the same du, or dW of the same input capsules in partial[split]. Later sections of outputs and later tiles of the
batch add to what the program stored before. So there are no atomics, and no sum depends on the order in which programs
run. passes.py adds up the splits of dW in order. A weight that all input capsules share has a partial dW per program.

A routing pass is one iteration. V is its query, ds the gradient of its first moment. With x = votes - center,
dvotes = c (ds + 2 dsecond x) + db (V - precision x). Only a pass with dsecond or precision needs the votes. Several
passes, such as those of EM routing, count as iterations; each has its own center, precision and dsecond.

dvotes of an input capsule stay in registers from one iteration to the next. If HELD, V and ds of all iterations also
stay in registers, from one input capsule to the next; there is room for few outputs at a time. Otherwise the kernel
loads V and ds for every input capsule.
"""

import triton
import triton.language as tl

from .arguments import KernelInputs
from .begin import begin
from .products import together, votes_to_inputs, votes_to_weights
from .stores import add_input_gradient, add_weight_gradient, store_votes_gradient
from .tiles import batch_rows, batch_tiles, first_tile, load_coefficients, per_input, valid_outputs, where_valid
from .vectors import add_scaled, load_state, load_vectors, no_terms, slope, vector_step, vector_tile, whole
from .votes import input_capsule, pose_tile, valid_votes, weight_tile


@triton.jit
def tiles_of(p_vectors, o_vectors, n0, T: tl.constexpr, S: tl.constexpr):
    """NT tiles from load_vectors()."""
    b_tiles = ()
    for n in tl.static_range(T.NT):
        b_tiles = b_tiles + (load_vectors(p_vectors, o_vectors, n0 + n, T, S),)
    return b_tiles


@triton.jit
def states_of(p_state, o_vectors, o_states, n0, T: tl.constexpr, S: tl.constexpr):
    """V and ds of an iteration, NT tiles each."""
    b_V = ()
    b_ds = ()
    for n in tl.static_range(T.NT):
        b_V_n, b_ds_n = load_state(p_state, o_vectors, o_states, n0 + n, T, S)
        b_V = b_V + (b_V_n,)
        b_ds = b_ds + (b_ds_n,)
    return b_V, b_ds


@triton.jit
def about_center(b_votes, inputs, t, o_vectors, n, T: tl.constexpr, R: tl.constexpr):
    """x of iteration t: the votes, minus the center of this iteration if there is one."""
    if inputs.p_center is not None:
        b_votes -= load_vectors(inputs.p_center + t * vector_step(T), o_vectors, n, T, R)
    return b_votes


@triton.jit
def add_iteration(
    b_dxs, b_V, b_ds, p_pairs, t, inputs, p_dsecond, b_votes, m_pairs, rows, o_vectors, capsule, n0,
    T: tl.constexpr, AGREEMENT: tl.constexpr, PARTED: tl.constexpr, R: tl.constexpr,
):
    """Adds dvotes of iteration t, c (ds + 2 dsecond x) + db (V - precision x), to all tiles of b_dxs. p_pairs points
    to c and db of this iteration."""
    b_next = ()
    step = t * vector_step(T)
    for n in tl.static_range(T.NT):
        b_c, b_db = load_coefficients(p_pairs, inputs, rows, capsule.i, n0 + n, m_pairs[n], T)
        b_x = about_center(b_votes[n], inputs, t, o_vectors, n0 + n, T, R)
        b_slope = slope(b_ds[n], b_x, p_dsecond, 2.0, o_vectors, n0 + n, T, R, step)
        b_dx_n = add_scaled(b_dxs[n], b_c, b_slope, T, PARTED)
        if AGREEMENT:
            b_V_n = b_V[n] if T.QUERY else None
            b_slope = slope(b_V_n, b_x, inputs.p_precision, -1.0, o_vectors, n0 + n, T, R, step)
            b_dx_n = add_scaled(b_dx_n, b_db, b_slope, T, PARTED)
        b_next = b_next + (b_dx_n,)
    return b_next


@triton.jit
def uniform_slopes(
    b_dxs, b_ds, b_factor, b_a, t, inputs, p_dsecond, b_votes, m_pairs, o_vectors, n0,
    T: tl.constexpr, PARTED: tl.constexpr, R: tl.constexpr,
):
    """Adds dvotes of iteration t, with equal couplings, to b_dxs. b_factor: the coupling of every row, [BB]; b_a: the
    activation, or None."""
    b_next = ()
    for n in tl.static_range(T.NT):
        b_c = where_valid(m_pairs[n], tl.broadcast_to(b_factor[:, None], [T.BB, T.JT]), 0.0, T.MASKED)
        if b_a is not None:
            b_c *= b_a[:, None]
        b_x = about_center(b_votes[n], inputs, t, o_vectors, n0 + n, T, R)
        b_slope = slope(b_ds[n], b_x, p_dsecond, 2.0, o_vectors, n0 + n, T, R, t * vector_step(T))
        b_next = b_next + (add_scaled(b_dxs[n], b_c, b_slope, T, PARTED),)
    return b_next


@triton.jit
def add_tiles(b_tiles, b_terms, T: tl.constexpr):
    b_sums = ()
    for n in tl.static_range(T.NT):
        b_sums = b_sums + (b_tiles[n] + b_terms[n],)
    return b_sums


@triton.jit
def weight_products(
    b_dx, b_u, p_dw, n, k0, stored, T: tl.constexpr, KB: tl.constexpr, BACK_DOT: tl.constexpr, KEEP_DW: tl.constexpr
):
    """If KEEP_DW, returns tile n of dW as a tuple of one; otherwise stores the tile and returns an empty tuple."""
    b_dw = ()
    if KEEP_DW or p_dw is not None:
        b_dw_n = votes_to_weights(b_dx, b_u, T.JT * T.LANES // 4, BACK_DOT)
        if KEEP_DW:
            b_dw = (b_dw_n,)
        else:
            add_weight_gradient(p_dw, b_dw_n, n, k0, stored, T, KB)
    return b_dw


@triton.jit
def add_products(
    inputs, b_dx, rows, capsule, k0, n0, last, p_du, p_room, p_dw, stored,
    T: tl.constexpr, KB: tl.constexpr, BACK_DOT: tl.constexpr, PARTED: tl.constexpr, KEEP_DW: tl.constexpr,
):
    """Stores components k from k0 on of du and dW of an input capsule. b_dx: dvotes, NT tiles. stored: whether an
    earlier part of this dW is stored. If KEEP_DW, returns dW instead, NT tiles [N, KB]."""
    ACROSS: tl.constexpr = T.JT * T.LANES // 4  # warps that share the columns of a row
    # du and dW of a tile share operands, but registers have room for both only if there are few components.
    TOGETHER: tl.constexpr = T.K <= KB
    b_u = capsule.b_u
    if T.K > KB or KB != T.KP:
        b_u = pose_tile(inputs, rows, capsule.m_rows, capsule.i, k0, T, KB)
    b_du = tl.zeros([T.BB, KB] if ACROSS <= 1 else [ACROSS, T.BB, KB], tl.float32)
    b_dw = ()
    if not TOGETHER:
        for n in tl.static_range(T.NT):
            weight_products(b_dx[n], b_u, p_dw, n0 + n, k0, stored, T, KB, BACK_DOT, False)
    for n in tl.static_range(T.NT):
        if p_du is not None:
            b_w = weight_tile(capsule.p_w, inputs, capsule.i, n0 + n, k0, T, KB)
            b_du = votes_to_inputs(b_dx[n], b_w, b_du, ACROSS, BACK_DOT, PARTED)
        if TOGETHER:
            b_dw = b_dw + weight_products(b_dx[n], b_u, p_dw, n0 + n, k0, stored, T, KB, BACK_DOT, KEEP_DW)
    if p_du is not None:
        b_du = together(b_du, ACROSS)
        add_input_gradient(p_du, p_room, b_du, inputs, rows, capsule, k0, n0, last, T, KB)
    return b_dw


@triton.jit(do_not_specialize=["B", "I", "chunk", "tiles", "sections"], do_not_specialize_on_alignment=["p_pairs"])
def gradient_kernel(
    p_x, p_w, p_logits, p_mask, p_out_mask,
    p_precision, p_center,  # R vectors, see strips.py, or None
    p_prior, p_activation,
    p_dsecond,  # R vectors or None
    p_state,  # state of R iterations, see passes.restore(): V and ds, at constant offsets
    p_pairs,  # [R - START, B, I, J, 2] float32: c, with the activation, and db of the iterations from START on
    p_factor,  # [B] float32 or None, if UNIFORM: the coupling of the first iteration
    p_dx,  # out: du [B, I, P K] or dvotes [B, I, J, D], or None
    p_room,  # float32 memory to sum du over sections of outputs if du is not float32, or None
    p_dw,  # out: [splits, I, J, D / P, K] or, if SHARED, [programs, J, D / P, K], or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk, tiles, sections, factor,
    T: tl.constexpr, BACK_DOT: tl.constexpr, START: tl.constexpr, R: tl.constexpr, UNIFORM: tl.constexpr,
    AGREEMENT: tl.constexpr, SHARED: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr = False,
):
    """START: the first iteration whose coupling depends on the pair (i, j). UNIFORM: the iteration before START has a
    gradient too, and all its couplings are equal. AGREEMENT: gradient="full". HELD: V and ds stay in registers, see
    above. tiles: batch tiles of a split.
    """
    begin(PDL)
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = KernelInputs(
        p_x, p_w, p_logits, p_mask, p_out_mask, p_precision, p_center, p_prior, p_activation,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump
    )
    # Splits first: if the number of splits divides the number of multiprocessors, the programs of a multiprocessor
    # share V and ds.
    split = tl.program_id(0)
    lo = tl.program_id(1) * chunk
    hi = tl.minimum(lo + chunk, I)
    C: tl.constexpr = T.D // T.P
    p_ds_uniform = p_state + (2 * START - 1) * vector_step(T)
    plane = 2 * tl.cast(B, tl.int64) * I * T.J
    batch_start = split * tiles
    batch_end = tl.minimum(batch_start + tiles, batch_tiles(inputs, T))
    # An axis that a product does not sum over may have 8 components, except for AMD's matrix instructions.
    LEAST: tl.constexpr = 16 if BACK_DOT == "ieee" else 8
    KB: tl.constexpr = max(T.KP, LEAST) if T.K > 8 else LEAST
    # See add_scaled(). With many tiles the parts would take long to compile.
    PARTED: tl.constexpr = T.LANES > 0 and (HELD or T.NT == 1)
    KEEP_DW: tl.constexpr = SHARED and T.K <= KB and p_dw is not None
    for tile in range(batch_start, batch_end):
        rows = batch_rows(tile, inputs, T)
        o_vectors = vector_tile(rows, T)
        o_states = vector_tile(rows, T, 2)
        if p_factor is not None:
            b_factor = tl.load(p_factor + rows.start + rows.o_b, mask=rows.m_rows, other=0.0)
        else:
            b_factor = tl.zeros([T.BB], tl.float32) + factor
        for section in range(sections):
            n0 = first_tile(section, T)
            last = section == sections - 1
            m_outputs = ()
            b_dw = ()
            for n in tl.static_range(T.NT):
                m_outputs = m_outputs + (valid_outputs(p_out_mask, rows, rows.m_rows, n0 + n, T),)
                if KEEP_DW:
                    b_dw = b_dw + (tl.zeros([T.JT * T.DP, KB], tl.float32),)
            b_states = ()
            b_ds_uniform = ()
            if HELD:
                if UNIFORM:
                    b_ds_uniform = tiles_of(p_ds_uniform, o_vectors, n0, T, 2 * R)
                for t in tl.static_range(START, R):
                    b_states = b_states + (
                        states_of(p_state + 2 * t * vector_step(T), o_vectors, o_states, n0, T, 2 * R),
                    )
            for i32 in range(lo, hi):
                capsule = input_capsule(inputs, rows, i32, T)
                b_votes = ()
                m_pairs = ()
                b_dxs = ()
                for n in tl.static_range(T.NT):
                    m_pairs = m_pairs + (m_outputs[n] & capsule.m_rows[:, None],)
                    if T.QUADRATIC:
                        b_votes = b_votes + (valid_votes(inputs, rows, capsule, n0 + n, m_pairs[n], T),)
                    else:
                        b_votes = b_votes + (0.0,)  # not used
                    b_dxs = b_dxs + (no_terms(T, PARTED),)
                if UNIFORM:
                    b_a = None
                    if p_activation is not None:
                        b_a = per_input(p_activation, rows, capsule.m_rows, capsule.i, inputs)
                    b_ds = b_ds_uniform if HELD else tiles_of(p_ds_uniform, o_vectors, n0, T, 2 * R)
                    b_dxs = uniform_slopes(
                        b_dxs, b_ds, b_factor, b_a, START - 1, inputs, p_dsecond, b_votes, m_pairs, o_vectors, n0,
                        T, PARTED, R
                    )
                if HELD:
                    for t in tl.static_range(START, R):
                        b_dxs = add_iteration(
                            b_dxs, b_states[t - START][0], b_states[t - START][1], p_pairs + (t - START) * plane, t,
                            inputs, p_dsecond, b_votes, m_pairs, rows, o_vectors, capsule, n0, T, AGREEMENT, PARTED, R
                        )
                else:
                    for t in range(START, R):
                        b_V, b_ds = states_of(p_state + 2 * t * vector_step(T), o_vectors, o_states, n0, T, 2 * R)
                        b_dxs = add_iteration(
                            b_dxs, b_V, b_ds, p_pairs + (t - START) * plane, t,
                            inputs, p_dsecond, b_votes, m_pairs, rows, o_vectors, capsule, n0, T, AGREEMENT, PARTED, R
                        )
                b_dx = ()
                for n in tl.static_range(T.NT):
                    b_dx = b_dx + (whole(b_dxs[n], T) if PARTED else b_dxs[n][0],)

                if T.VOTES:
                    for n in tl.static_range(T.NT):
                        store_votes_gradient(p_dx, b_dx[n], inputs, rows, capsule, n0 + n, T)
                elif KEEP_DW:
                    b_dw = add_tiles(b_dw, add_products(
                        inputs, b_dx, rows, capsule, 0, n0, last, p_dx, p_room, None, 0, T, KB, BACK_DOT, PARTED, True
                    ), T)
                else:
                    owner = tl.cast(split, tl.int64) * I + capsule.i
                    stored = tile - batch_start
                    if SHARED:
                        owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                        stored += i32 - lo
                    p_dw_i = None if p_dw is None else p_dw + owner * (T.J * C * T.K)
                    for k0 in range(0, T.K, KB):
                        add_products(
                            inputs, b_dx, rows, capsule, k0, n0, last, p_dx, p_room, p_dw_i, stored,
                            T, KB, BACK_DOT, PARTED, False
                        )
                    if SHARED and p_dw is not None:
                        # The next input capsule adds to this dW, which other threads may have stored.
                        tl.debug_barrier()
            # The next tile or section adds to what other threads may have stored.
            tl.debug_barrier()
            if KEEP_DW:
                owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                p_dw_i = p_dw + owner * (T.J * C * T.K)
                for n in tl.static_range(T.NT):
                    add_weight_gradient(p_dw_i, b_dw[n], n0 + n, 0, tile - batch_start, T, KB)
                tl.debug_barrier()
