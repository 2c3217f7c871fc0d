"""row_norm, the pass that runs before others if a softmax has more outputs than a program holds."""

import triton
import triton.language as tl

from .arguments import Given, Inputs
from .begin import begin
from .softmax import exponential, finite_or_zero, inverse, store_row_norms
from .tiles import batch_rows, per_input, valid_outputs, where_valid
from .vectors import load_vectors, vector_step, vector_tile
from .votes import coupling_gradient, input_capsule, routing_logits, votes_about_center


@triton.jit(do_not_specialize=["B", "I", "chunk", "groups"])
def row_norm_kernel(
    x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr,
    precision_ptr, center_ptr, prior_ptr, activation_ptr,
    dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr,
    state_ptr,  # V or, if WITH_DS, V and ds of this iteration of a state
    rows_ptr,  # [B, I, 4] float32, out
    x_b, x_i: tl.constexpr, w_i: tl.constexpr,
    positions, s_i, s_j, s_d, x_jump,
    B, I, chunk, groups,
    T: tl.constexpr, WITH_DS: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr = False,
):
    """Maximum and 1 / sum of every row (b, i) of logits and, if WITH_DS, sum_j c dc. Goes through outputs tile by tile.

    Program (batch tile, split) has BB samples and a slice of the input capsules.
    """
    begin(PDL)
    xs = (x_b, x_i, T.x_j, T.x_d) if positions is None else (x_b, s_i, s_j, s_d)
    inputs = Inputs(
        x_ptr, w_ptr, logits_ptr, mask_ptr, out_mask_ptr, precision_ptr, center_ptr, prior_ptr, activation_ptr,
        xs, (w_i, T.w_j, T.w_d, T.w_k), B, I, positions, x_jump
    )
    given = Given(dcoupling_ptr, dmass_ptr, dsecond_ptr, dlse_ptr)
    rows = batch_rows(tl.program_id(0), inputs, T)
    vectors = vector_tile(rows, T)
    S: tl.constexpr = 2 * R if WITH_DS else 1
    lo = tl.program_id(1) * chunk
    for i32 in range(lo, tl.minimum(lo + chunk, I)):
        here = input_capsule(inputs, rows, i32, T, w_i == 0)
        # If LEAKY, the softmax has one more entry, with logit 0.
        m = tl.full([T.BB], 0.0 if T.LEAKY else float("-inf"), tl.float32)
        total = tl.full([T.BB], 1.0 if T.LEAKY else 0.0, tl.float32)
        inner = tl.zeros([T.BB], tl.float32)
        for n in range(groups * T.NT):
            valid = valid_outputs(out_mask_ptr, rows, here.ok, n, T)
            x = votes_about_center(inputs, rows, vectors, here, n, valid, T)
            V = load_vectors(state_ptr, vectors, n, T, S) if T.QUERY else None
            b = routing_logits(inputs, x, V, rows, vectors, here, n, valid, T)
            grown = tl.maximum(m, tl.max(b, 1))
            least = finite_or_zero(grown)
            scale = exponential(m - least)
            e = exponential(b - least[:, None])
            total = total * scale + tl.sum(e, 1)
            if WITH_DS:
                ds = load_vectors(state_ptr + vector_step(T), vectors, n, T, S)
                dc = coupling_gradient(inputs, given, x, None, ds, rows, vectors, here, n, valid, T)
                inner = inner * scale + tl.sum(where_valid(valid, e * dc, 0.0, T.MASKED), 1)
            m = grown
        scale = inverse(total)
        if WITH_DS:
            if activation_ptr is not None:
                inner *= per_input(activation_ptr, rows, here.ok, here.i, inputs)
            if dlse_ptr is not None:
                inner -= per_input(dlse_ptr, rows, here.ok, here.i, inputs) * total
        store_row_norms(rows_ptr, finite_or_zero(m), scale, inner * scale, rows, here, inputs)
