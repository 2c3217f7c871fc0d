"""The gradient pass: dvotes = sum_t c_t ds_t + db_t V_t, and from it du and dW.

Iteration t scored the votes with V_t; t counts from 0, so V_0 = 0. accumulate_gradient stored the coefficients c_t and
db_t. Program (split, chunk) has the input capsules of its chunk and the batch tiles of its split. No other program
writes the same du, or dW of the same input capsules in partial[split]. Later groups of outputs and later tiles of the
batch add to what the program stored before. So there are no atomics, and no sum depends on the order in which programs
run. passes.py adds up the splits of dW in order. A weight that all input capsules share has a partial dW per program.

A routing pass is one iteration. V is its query, ds the gradient of its first moment. With x = votes - center,
dvotes = c (ds + 2 dsecond x) + db (V - precision x). Only a pass with dsecond or precision needs the votes.

dvotes of an input capsule stay in registers from one iteration to the next. If HELD, V and ds of all iterations also
stay in registers, from one input capsule to the next; there is room for few outputs at a time. Otherwise the kernel
loads V and ds for every input capsule.
"""

import triton
import triton.language as tl

from .arguments import Inputs
from .begin import begin
from .products import together, votes_to_inputs, votes_to_weights
from .stores import add_input_gradient, add_weight_gradient, store_votes_gradient
from .tiles import batch_rows, batch_tiles, first_tile, load_coefficients, per_input, valid_outputs, where_valid
from .vectors import add_scaled, load_state, load_vectors, no_terms, slope, vector_step, vector_tile, whole
from .votes import input_capsule, pose_tile, votes_about_center, weight_tile


@triton.jit
def tiles_of(ptr, vectors, first, T: tl.constexpr, S: tl.constexpr):
    """NT tiles from load_vectors()."""
    found = ()
    for n in tl.static_range(T.NT):
        found = found + (load_vectors(ptr, vectors, first + n, T, S),)
    return found


@triton.jit
def states_of(state_ptr, vectors, states, first, T: tl.constexpr, S: tl.constexpr):
    """V and ds of an iteration, NT tiles each."""
    V = ()
    ds = ()
    for n in tl.static_range(T.NT):
        V_n, ds_n = load_state(state_ptr, vectors, states, first + n, T, S)
        V = V + (V_n,)
        ds = ds + (ds_n,)
    return V, ds


@triton.jit
def add_iteration(
    dxs, V, ds, pairs_ptr, inputs, dsecond_ptr, x, valid, rows, vectors, here, first,
    T: tl.constexpr, AGREEMENT: tl.constexpr, PARTED: tl.constexpr,
):
    """Adds dvotes of an iteration, c (ds + 2 dsecond x) + db (V - precision x), to all tiles of dxs. pairs_ptr points
    to c and db of this iteration."""
    found = ()
    for n in tl.static_range(T.NT):
        c, db = load_coefficients(pairs_ptr, inputs, rows, here.i, first + n, valid[n], T)
        each = add_scaled(dxs[n], c, slope(ds[n], x[n], dsecond_ptr, 2.0, vectors, first + n, T), T, PARTED)
        if AGREEMENT:
            query = V[n] if T.QUERY else None
            curved = slope(query, x[n], inputs.precision, -1.0, vectors, first + n, T)
            each = add_scaled(each, db, curved, T, PARTED)
        found = found + (each,)
    return found


@triton.jit
def uniform_slopes(dxs, ds, factor, a, dsecond_ptr, x, valid, vectors, first, T: tl.constexpr, PARTED: tl.constexpr):
    """Adds dvotes of an iteration with equal couplings to dxs. factor: the coupling of every row, [BB]; a: the
    activation, or None."""
    found = ()
    for n in tl.static_range(T.NT):
        c = where_valid(valid[n], tl.broadcast_to(factor[:, None], [T.BB, T.JT]), 0.0, T.MASKED)
        if a is not None:
            c *= a[:, None]
        curved = slope(ds[n], x[n], dsecond_ptr, 2.0, vectors, first + n, T)
        found = found + (add_scaled(dxs[n], c, curved, T, PARTED),)
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
    """If KEEP_DW, returns tile n of dW as a tuple of one; otherwise stores the tile and returns an empty tuple."""
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
    T: tl.constexpr, KB: tl.constexpr, BACK_DOT: tl.constexpr, PARTED: tl.constexpr, KEEP_DW: tl.constexpr,
):
    """Stores components k from k0 on of du and dW of an input capsule. dx: dvotes, NT tiles. stored: whether an earlier
    part of this dW is stored. If KEEP_DW, returns dW instead, NT tiles [N, KB]."""
    ACROSS: tl.constexpr = T.JT * T.LANES // 4  # warps that share the columns of a row
    # du and dW of a tile share operands, but registers have room for both only if there are few components.
    TOGETHER: tl.constexpr = T.K <= KB
    u = here.u
    if T.K > KB or KB != T.KP:
        u = pose_tile(inputs, rows, here.ok, here.i, k0, T, KB)
    du = tl.zeros([T.BB, KB] if ACROSS <= 1 else [ACROSS, T.BB, KB], tl.float32)
    dw = ()
    if not TOGETHER:
        for n in tl.static_range(T.NT):
            weight_products(dx[n], u, dw_ptr, first + n, k0, stored, T, KB, BACK_DOT, False)
    for n in tl.static_range(T.NT):
        if du_ptr is not None:
            w = weight_tile(here.w, inputs, here.i, first + n, k0, T, KB)
            du = votes_to_inputs(dx[n], w, du, ACROSS, BACK_DOT, PARTED)
        if TOGETHER:
            dw = dw + weight_products(dx[n], u, dw_ptr, first + n, k0, stored, T, KB, BACK_DOT, KEEP_DW)
    if du_ptr is not None:
        du = together(du, ACROSS)
        add_input_gradient(du_ptr, room_ptr, du, inputs, rows, here, k0, first, last, T, KB)
    return dw


@triton.jit(
    do_not_specialize=["B", "I", "chunk", "tiles", "groups"], do_not_specialize_on_alignment=["pairs_ptr"]
)
def gradient_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,
    dsecond_ptr,  # vectors, see strips.py, or None
    state_ptr,  # state of R iterations, see passes.restore(): V and ds, at constant offsets
    pairs_ptr,  # [R - START, B, I, J, 2] float32: c, with the activation, and db of the iterations from START on
    factor_ptr,  # [B] float32 or None, if UNIFORM: the coupling of the first iteration
    dx_ptr,  # out: du [B, I, P K] or dvotes [B, I, J, D], or None
    room_ptr,  # float32 memory to sum du over groups of outputs if du is not float32, or None
    dw_ptr,  # out: [splits, I, J, D / P, K] or, if SHARED, [programs, J, D / P, K], or None
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk, tiles, groups, factor,
    T: tl.constexpr, BACK_DOT: tl.constexpr, START: tl.constexpr, R: tl.constexpr, UNIFORM: tl.constexpr,
    AGREEMENT: tl.constexpr, SHARED: tl.constexpr, HELD: tl.constexpr, PDL: tl.constexpr = False,
):
    """START: the first iteration whose coupling depends on the pair (i, j). UNIFORM: the iteration before START has a
    gradient too, and all its couplings are equal. AGREEMENT: gradient="full". HELD: V and ds stay in registers, see
    above. tiles: batch tiles of a split.
    """
    begin(PDL)
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = Inputs(
        x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr, precision_ptr, center_ptr, prior_ptr, activation_ptr,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump
    )
    # Splits first: if the number of splits divides the number of multiprocessors, the programs of a multiprocessor
    # share V and ds.
    split = tl.program_id(0)
    lo = tl.program_id(1) * chunk
    hi = tl.minimum(lo + chunk, I)
    C: tl.constexpr = T.D // T.P
    before_ptr = state_ptr + (2 * START - 1) * vector_step(T)
    plane = 2 * tl.cast(B, tl.int64) * I * T.J
    batch_start = split * tiles
    batch_end = tl.minimum(batch_start + tiles, batch_tiles(inputs, T))
    # An axis that a product does not sum over may have 8 components, except for AMD's matrix instructions.
    LEAST: tl.constexpr = 16 if BACK_DOT == "ieee" else 8
    KB: tl.constexpr = max(T.KP, LEAST) if T.K > 8 else LEAST
    # See add_scaled(). With many tiles the parts would take long to compile.
    PARTED: tl.constexpr = T.LANES > 0 and (HELD or T.NT == 1)
    KEEP_DW: tl.constexpr = SHARED and T.K <= KB and dw_ptr is not None
    for tile in range(batch_start, batch_end):
        rows = batch_rows(tile, inputs, T)
        vectors = vector_tile(rows, T)
        states = vector_tile(rows, T, 2)
        if factor_ptr is not None:
            each = tl.load(factor_ptr + rows.first + rows.local, mask=rows.inside, other=0.0)
        else:
            each = tl.zeros([T.BB], tl.float32) + factor
        for group in range(groups):
            first = first_tile(group, T)
            last = group == groups - 1
            known = ()
            dw = ()
            for n in tl.static_range(T.NT):
                known = known + (valid_outputs(out_mask_ptr, rows, rows.inside, first + n, T),)
                if KEEP_DW:
                    dw = dw + (tl.zeros([T.JT * T.DP, KB], tl.float32),)
            held = ()
            ds_before = ()
            if HELD:
                if UNIFORM:
                    ds_before = tiles_of(before_ptr, vectors, first, T, 2 * R)
                for t in tl.static_range(START, R):
                    held = held + (states_of(state_ptr + 2 * t * vector_step(T), vectors, states, first, T, 2 * R),)
            for i32 in range(lo, hi):
                here = input_capsule(inputs, rows, i32, T)
                x = ()
                valid = ()
                dxs = ()
                for n in tl.static_range(T.NT):
                    valid = valid + (known[n] & here.ok[:, None],)
                    if T.QUADRATIC:
                        x = x + (votes_about_center(inputs, rows, vectors, here, first + n, valid[n], T),)
                    else:
                        x = x + (0.0,)  # not used
                    dxs = dxs + (no_terms(T, PARTED),)
                if UNIFORM:
                    a = per_input(activation_ptr, rows, here.ok, here.i, inputs) if activation_ptr is not None else None
                    ds = ds_before if HELD else tiles_of(before_ptr, vectors, first, T, 2 * R)
                    dxs = uniform_slopes(dxs, ds, each, a, dsecond_ptr, x, valid, vectors, first, T, PARTED)
                if HELD:
                    for t in tl.static_range(START, R):
                        dxs = add_iteration(
                            dxs, held[t - START][0], held[t - START][1], pairs_ptr + (t - START) * plane,
                            inputs, dsecond_ptr, x, valid, rows, vectors, here, first, T, AGREEMENT, PARTED
                        )
                else:
                    for t in range(START, R):
                        V, ds = states_of(state_ptr + 2 * t * vector_step(T), vectors, states, first, T, 2 * R)
                        dxs = add_iteration(
                            dxs, V, ds, pairs_ptr + (t - START) * plane,
                            inputs, dsecond_ptr, x, valid, rows, vectors, here, first, T, AGREEMENT, PARTED
                        )
                dx = ()
                for n in tl.static_range(T.NT):
                    dx = dx + (whole(dxs[n], T) if PARTED else dxs[n][0],)

                if T.VOTES:
                    for n in tl.static_range(T.NT):
                        store_votes_gradient(dx_ptr, dx[n], inputs, rows, here, first + n, T)
                elif KEEP_DW:
                    dw = add_tiles(dw, add_products(
                        inputs, dx, rows, here, 0, first, last, dx_ptr, room_ptr, None, 0, T, KB, BACK_DOT, PARTED, True
                    ), T)
                else:
                    owner = tl.cast(split, tl.int64) * I + here.i
                    stored = tile - batch_start
                    if SHARED:
                        owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                        stored += i32 - lo
                    dw_at = None if dw_ptr is None else dw_ptr + owner * (T.J * C * T.K)
                    for k0 in range(0, T.K, KB):
                        add_products(
                            inputs, dx, rows, here, k0, first, last, dx_ptr, room_ptr, dw_at, stored,
                            T, KB, BACK_DOT, PARTED, False
                        )
                    if SHARED and dw_ptr is not None:
                        # The next input capsule adds to this dW, which other threads may have stored.
                        tl.debug_barrier()
            # The next tile or group adds to what other threads may have stored.
            tl.debug_barrier()
            if KEEP_DW:
                owner = tl.cast(split, tl.int64) * tl.num_programs(1) + tl.program_id(1)
                dw_at = dw_ptr + owner * (T.J * C * T.K)
                for n in tl.static_range(T.NT):
                    add_weight_gradient(dw_at, dw[n], first + n, 0, tile - batch_start, T, KB)
                tl.debug_barrier()
