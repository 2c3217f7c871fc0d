"""row_norm, the pass that runs before others if a softmax has more outputs than a program holds, and what joins its
parts."""

import triton
import triton.language as tl

from .arguments import Given, Inputs
from .begin import begin
from .softmax import exponential, finite_or_zero, inverse, over_tiles, row_maximum
from .tiles import batch_rows, first_tile, valid_outputs, where_valid
from .vectors import load_vectors, vector_step, vector_tile
from .votes import coupling_gradient, input_capsule, routing_logits, votes_about_center


@triton.jit
def store_part(ptr, values, rows, here, inputs, T: tl.constexpr, N: tl.constexpr):
    """Stores N numbers per row, [BB] each, in [N, groups, B, I].

    All four lanes of a row have the numbers, and the first N lanes store one each. As in store_pairs(), [M] is in the
    order in which the compiler distributes M, so no number changes lanes.
    """
    DOWN: tl.constexpr = T.BB // 16
    ACROSS: tl.constexpr = max(1, T.JT * T.LANES // 4)
    M: tl.constexpr = T.BB * ACROSS * 4
    index = tl.arange(0, M)
    lane = index % 4
    row = (index // (32 * ACROSS) % DOWN * 2 + index // (32 * ACROSS * DOWN)) * 8 + index // 4 % 8
    value = tl.zeros([M], tl.float32)
    for n in tl.static_range(N):
        each = tl.broadcast_to(values[n][:, None], [T.BB, ACROSS * 4])
        each = tl.reshape(tl.permute(tl.reshape(each, [DOWN, 2, 8, ACROSS, 4]), (1, 0, 3, 2, 4)), [M])
        value = tl.where(lane == n, each, value)
    sample = row // T.PP
    inside = (lane < N) & (index // 32 % ACROSS == 0) & (row % T.PP == 0) & (sample < rows.count)
    plane = tl.num_programs(2) * tl.cast(inputs.B, tl.int64) * inputs.I
    tl.store(ptr + here.i + sample * inputs.I + lane * plane, value, mask=inside)


@triton.jit(do_not_specialize=["B", "I", "chunk"])
def row_norm_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,
    dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr,
    state_ptr,  # V or, if WITH_DS, V and ds of this iteration of a state
    parts_ptr,  # [2 or 3, groups, B, I] float32, out: maximum, sum of exponentials and, if WITH_DS, of those times dc
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk,
    T: tl.constexpr, WITH_DS: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr = False,
):
    """The softmax of every row (b, i) of logits, as far as the outputs of a group go.

    Program (batch tile, split, group) has BB samples, a slice of the input capsules and NT tiles of outputs. It keeps V
    and ds of these outputs.
    """
    begin(PDL)
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = Inputs(
        x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr, precision_ptr, center_ptr, prior_ptr, activation_ptr,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump
    )
    given = Given(dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr)
    rows = batch_rows(tl.program_id(0), inputs, T)
    group = tl.program_id(2)
    first = first_tile(group, T)
    vectors = vector_tile(rows, T)
    S: tl.constexpr = 2 * R if WITH_DS else 1
    V = ()
    ds = ()
    known = ()
    for n in tl.static_range(T.NT):
        if T.QUERY:
            V = V + (load_vectors(state_ptr, vectors, first + n, T, S),)
        if WITH_DS:
            ds = ds + (load_vectors(state_ptr + vector_step(T), vectors, first + n, T, S),)
        known = known + (valid_outputs(out_mask_ptr, rows, rows.inside, first + n, T),)
    part = parts_ptr + (group * tl.cast(B, tl.int64) + rows.first) * I
    lo = tl.program_id(1) * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        here = input_capsule(inputs, rows, i32, T, w_i == 0)
        b = ()
        dc = ()
        for n in tl.static_range(T.NT):
            valid = known[n] & here.ok[:, None]
            x = votes_about_center(inputs, rows, vectors, here, first + n, valid, T)
            V_n = V[n] if T.QUERY else x
            b = b + (routing_logits(inputs, x, V_n, rows, vectors, here, first + n, valid, T),)
            if WITH_DS:
                each = coupling_gradient(inputs, given, x, None, ds[n], rows, vectors, here, first + n, valid, T)
                dc = dc + (where_valid(valid, each, 0.0, T.MASKED),)
        m = finite_or_zero(row_maximum(b, T))
        e = ()
        inner = ()
        for n in tl.static_range(T.NT):
            e = e + (exponential(b[n] - m[:, None]),)
            if WITH_DS:
                inner = inner + (e[n] * dc[n],)
        numbers = (m, over_tiles(e, T))
        if WITH_DS:
            numbers = numbers + (over_tiles(inner, T),)
        store_part(part, numbers, rows, here, inputs, T, 2 + WITH_DS)


@triton.jit(do_not_specialize=["n", "groups"])
def join_row_norms_kernel(
    parts_ptr,  # from row_norm, [2 or 3, groups, n] for n = B I rows
    activation_ptr, dlse_ptr,  # [n] float32, or None
    rows_ptr,  # [n, 4] float32, out: see arguments.Norms
    n, groups,
    LEAKY: tl.constexpr, WITH_DS: tl.constexpr, WIDTH: tl.constexpr, GB: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Maximum, 1 / sum and, if WITH_DS, sum_j c dc of every row, from its parts. Takes GB groups at once, in order."""
    begin(PDL)
    at = tl.cast(tl.program_id(0), tl.int64) * WIDTH + tl.arange(0, WIDTH)
    plane = tl.cast(groups, tl.int64) * n
    # If LEAKY, the softmax has one more entry, with logit 0.
    m = tl.full([WIDTH], 0.0 if LEAKY else float("-inf"), tl.float32)
    total = tl.full([WIDTH], 1.0 if LEAKY else 0.0, tl.float32)
    inner = tl.zeros([WIDTH], tl.float32)
    for start in range(0, groups, GB):
        group = start + tl.arange(0, GB)
        within = (group < groups)[:, None] & (at < n)[None, :]
        part = parts_ptr + tl.cast(group, tl.int64)[:, None] * n + at[None, :]
        totals = tl.load(part + plane, mask=within, other=0.0)
        # A group without a finite logit has the sum 0.
        maxima = tl.where(totals == 0.0, float("-inf"), tl.load(part, mask=within, other=0.0))
        grown = tl.maximum(m, tl.max(maxima, 0))
        least = finite_or_zero(grown)
        scale = exponential(m - least)
        scales = exponential(maxima - least[None, :])
        total = total * scale + tl.sum(totals * scales, 0)
        if WITH_DS:
            inner = inner * scale + tl.sum(tl.load(part + 2 * plane, mask=within, other=0.0) * scales, 0)
        m = grown
    scale = inverse(total)
    if WITH_DS:
        if activation_ptr is not None:
            inner *= tl.load(activation_ptr + at, mask=at < n, other=0.0)
        if dlse_ptr is not None:
            inner -= tl.load(dlse_ptr + at, mask=at < n, other=0.0) * total
    tl.store(rows_ptr + 4 * at, finite_or_zero(m), mask=at < n)
    tl.store(rows_ptr + 4 * at + 1, scale, mask=at < n)
    tl.store(rows_ptr + 4 * at + 2, inner * scale, mask=at < n)
