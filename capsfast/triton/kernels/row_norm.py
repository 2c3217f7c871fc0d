"""row_norm, the pass that runs before the others if a softmax has more outputs than a program holds, and the kernel
that joins the parts that row_norm stores."""

import triton
import triton.language as tl

from .arguments import KernelInputs, OutputGradients
from .begin import begin
from .softmax import exponential, finite_or_zero, inverse, over_tiles, row_maximum
from .tiles import batch_rows, first_tile, valid_outputs, where_valid
from .vectors import load_vectors, vector_step, vector_tile
from .votes import coupling_gradient, input_capsule, routing_logits, votes_about_center


@triton.jit
def store_part(p_parts, b_values, rows, capsule, inputs, T: tl.constexpr, N: tl.constexpr):
    """Stores N numbers per row, [BB] each, in [N, sections, B, I].

    All four lanes of a row have the numbers, and the first N lanes store one each. As in store_pairs(), [M] is in the
    order in which the compiler distributes M, so no number changes lanes.
    """
    DOWN: tl.constexpr = T.BB // 16
    ACROSS: tl.constexpr = max(1, T.JT * T.LANES // 4)
    M: tl.constexpr = T.BB * ACROSS * 4
    index = tl.arange(0, M)
    lane = index % 4
    row = (index // (32 * ACROSS) % DOWN * 2 + index // (32 * ACROSS * DOWN)) * 8 + index // 4 % 8
    b_value = tl.zeros([M], tl.float32)
    for n in tl.static_range(N):
        b_number = tl.broadcast_to(b_values[n][:, None], [T.BB, ACROSS * 4])
        b_number = tl.reshape(tl.permute(tl.reshape(b_number, [DOWN, 2, 8, ACROSS, 4]), (1, 0, 3, 2, 4)), [M])
        b_value = tl.where(lane == n, b_number, b_value)
    o_b = row // T.PP
    m_rows = (lane < N) & (index // 32 % ACROSS == 0) & (row % T.PP == 0) & (o_b < rows.count)
    plane = tl.num_programs(2) * tl.cast(inputs.B, tl.int64) * inputs.I
    tl.store(p_parts + capsule.i + o_b * inputs.I + lane * plane, b_value, mask=m_rows)


@triton.jit(do_not_specialize=["B", "I", "chunk"])
def row_norm_kernel(
    p_x, p_w, p_logits, p_mask, p_out_mask,
    p_precision, p_center, p_prior, p_activation,
    p_dcoupling, p_dmass, p_dsecond, p_dlse,
    p_state,  # V or, if WITH_DS, V and ds of this iteration in a state of R; precision, center, dsecond: also one of R
    p_parts,  # [2 or 3, sections, B, I] float32, out: maximum, sum of exponentials and, if WITH_DS, of those times dc
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk,
    T: tl.constexpr, WITH_DS: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr = False,
):
    """The maximum and the sums of the softmax of every row (b, i) of logits, over the outputs of one section.

    Program (batch tile, split, section) has BB samples, a slice of the input capsules and NT tiles of outputs. It
    keeps V and ds of these outputs.
    """
    begin(PDL)
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = KernelInputs(
        p_x, p_w, p_logits, p_mask, p_out_mask, p_precision, p_center, p_prior, p_activation,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump
    )
    douts = OutputGradients(p_dcoupling, p_dmass, p_dsecond, p_dlse)
    rows = batch_rows(tl.program_id(0), inputs, T)
    section = tl.program_id(2)
    n0 = first_tile(section, T)
    o_vectors = vector_tile(rows, T)
    S: tl.constexpr = R if WITH_DS else 1
    STATES: tl.constexpr = 2 * R if WITH_DS else 1
    b_V = ()
    b_ds = ()
    m_outputs = ()
    for n in tl.static_range(T.NT):
        if T.QUERY:
            b_V = b_V + (load_vectors(p_state, o_vectors, n0 + n, T, STATES),)
        if WITH_DS:
            b_ds = b_ds + (load_vectors(p_state + vector_step(T), o_vectors, n0 + n, T, STATES),)
        m_outputs = m_outputs + (valid_outputs(p_out_mask, rows, rows.m_rows, n0 + n, T),)
    p_part = p_parts + (section * tl.cast(B, tl.int64) + rows.start) * I
    lo = tl.program_id(1) * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        capsule = input_capsule(inputs, rows, i32, T, w_i == 0)
        b_logits = ()
        b_dc = ()
        for n in tl.static_range(T.NT):
            m_pairs = m_outputs[n] & capsule.m_rows[:, None]
            b_x = votes_about_center(inputs, rows, o_vectors, capsule, n0 + n, m_pairs, T, S)
            b_V_n = b_V[n] if T.QUERY else b_x
            b_logits = b_logits + (
                routing_logits(inputs, b_x, b_V_n, rows, o_vectors, capsule, n0 + n, m_pairs, T, S=S),
            )
            if WITH_DS:
                b_dc_n = coupling_gradient(
                    inputs, douts, b_x, None, b_ds[n], rows, o_vectors, capsule, n0 + n, m_pairs, T, S
                )
                b_dc = b_dc + (where_valid(m_pairs, b_dc_n, 0.0, T.MASKED),)
        b_max = finite_or_zero(row_maximum(b_logits, T))
        b_exp = ()
        b_inner = ()
        for n in tl.static_range(T.NT):
            b_exp = b_exp + (exponential(b_logits[n] - b_max[:, None]),)
            if WITH_DS:
                b_inner = b_inner + (b_exp[n] * b_dc[n],)
        numbers = (b_max, over_tiles(b_exp, T))
        if WITH_DS:
            numbers = numbers + (over_tiles(b_inner, T),)
        store_part(p_part, numbers, rows, capsule, inputs, T, 2 + WITH_DS)


@triton.jit(do_not_specialize=["n", "sections"])
def join_row_norms_kernel(
    p_parts,  # from row_norm, [2 or 3, sections, n] for n = B I rows
    p_activation, p_dlse,  # [n] float32, or None
    p_rows,  # [n, 4] float32, out: see arguments.Norms
    n, sections,
    LEAKY: tl.constexpr, WITH_DS: tl.constexpr, WIDTH: tl.constexpr, GB: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Maximum, 1 / sum and, if WITH_DS, sum_j c dc of every row, from its parts. Takes GB sections at a time."""
    begin(PDL)
    o_row = tl.cast(tl.program_id(0), tl.int64) * WIDTH + tl.arange(0, WIDTH)
    plane = tl.cast(sections, tl.int64) * n
    # If LEAKY, the softmax has one more entry, with logit 0.
    b_max = tl.full([WIDTH], 0.0 if LEAKY else float("-inf"), tl.float32)
    b_total = tl.full([WIDTH], 1.0 if LEAKY else 0.0, tl.float32)
    b_inner = tl.zeros([WIDTH], tl.float32)
    for start in range(0, sections, GB):
        o_section = start + tl.arange(0, GB)
        m_parts = (o_section < sections)[:, None] & (o_row < n)[None, :]
        p_part = p_parts + tl.cast(o_section, tl.int64)[:, None] * n + o_row[None, :]
        b_totals = tl.load(p_part + plane, mask=m_parts, other=0.0)
        # A section without a finite logit has the sum 0.
        b_maxima = tl.where(b_totals == 0.0, float("-inf"), tl.load(p_part, mask=m_parts, other=0.0))
        b_new_max = tl.maximum(b_max, tl.max(b_maxima, 0))
        b_shift = finite_or_zero(b_new_max)
        b_scale = exponential(b_max - b_shift)
        b_scales = exponential(b_maxima - b_shift[None, :])
        b_total = b_total * b_scale + tl.sum(b_totals * b_scales, 0)
        if WITH_DS:
            b_inner = b_inner * b_scale + tl.sum(tl.load(p_part + 2 * plane, mask=m_parts, other=0.0) * b_scales, 0)
        b_max = b_new_max
    b_scale = inverse(b_total)
    if WITH_DS:
        if p_activation is not None:
            b_inner *= tl.load(p_activation + o_row, mask=o_row < n, other=0.0)
        if p_dlse is not None:
            b_inner -= tl.load(p_dlse + o_row, mask=o_row < n, other=0.0) * b_total
    tl.store(p_rows + 4 * o_row, finite_or_zero(b_max), mask=o_row < n)
    tl.store(p_rows + 4 * o_row + 1, b_scale, mask=o_row < n)
    tl.store(p_rows + 4 * o_row + 2, b_inner * b_scale, mask=o_row < n)
