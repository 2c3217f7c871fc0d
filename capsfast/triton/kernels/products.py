"""Products by tensor cores: votes from input capsules; gradients of input capsules and weights from dvotes."""

import triton
import triton.language as tl

from ..config import RELEASE, refuses_k8

# How many neighbouring columns a lane has of a float32 operand, as the compiler lays it out.
RUN_OF_FLOAT = tl.constexpr(1 if RELEASE >= (3, 8) else 2)

if refuses_k8():

    @tl.core.builtin
    def dot_tf32(a, b, acc, max_num_imprecise_acc=None, _semantic=None):  # type: ignore[no-untyped-def]
        """tl.dot() with K = 8 too, for which the compiler behind the front end emits m16n8k8."""
        functions = _semantic.builder.codegen_fns
        smallest = functions["min_dot_size"]
        functions["min_dot_size"] = lambda *_: (1, 1, 8)
        try:
            return tl.core.dot(a, b, acc, "tf32", None, max_num_imprecise_acc, _semantic=_semantic)
        finally:
            functions["min_dot_size"] = smallest

else:

    @triton.jit
    def dot_tf32(a, b, acc, IMPRECISE: tl.constexpr = None):
        return tl.dot(a, b, acc, input_precision="tf32", max_num_imprecise_acc=IMPRECISE)


@triton.jit
def head(x):
    """x cut to TF32. The rest, x - head(x), is exact; it has 2 bits more than TF32 holds."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def nearest(x):
    """x changed so that a tensor core, which truncates it to TF32, takes the nearest number. NaN stays as it is."""
    return tl.where(x == x, (x.to(tl.int32, bitcast=True) + 4096).to(tl.float32, bitcast=True), x)


@triton.jit
def turned(a, TURN: tl.constexpr):
    """a with its last two axes swapped, if TURN."""
    if TURN:
        a = tl.trans(a) if len(a.shape) == 2 else tl.permute(a, (0, 2, 1))
    return a


@triton.jit
def product(a, b, acc, DOT: tl.constexpr, TURN: tl.constexpr = False):
    """acc + a b, or if TURN acc + a^T b, by tensor cores. DOT "half": 16-bit operands. "ieee": float32, which the
    matrix instructions of AMD and the interpreter multiply as it is. "tf32": one TF32 product.
    "tf32x3": three TF32 products, for the accuracy of float32. "tf32x2": two TF32 products, for a b that was converted
    from 16 bits and is exact in TF32. "bf16x2": two bfloat16 products with 16 bits of a, for a bfloat16 b; the results
    are rounded to 8 bits later. bfloat16 takes half the matrix instructions, and the 16-bit instructions transpose a.

    input_precision="tf32x3" is not used, because it also replaces infinities, with a select for every element. a is
    transposed after its split: so a goes through shared memory; transposed first, a would take many shuffles.
    max_num_imprecise_acc has one effect for these types: the compiler does not move outside sums into the tensor core.
    """
    if DOT == "half":
        acc = tl.dot(turned(a, TURN), b, acc, max_num_imprecise_acc=1)
    elif DOT == "ieee":
        acc = tl.dot(turned(a, TURN).to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    elif DOT == "bf16x2":
        # Truncated, not rounded: so one instruction takes the upper halves of two numbers.
        bits = a.to(tl.int32, bitcast=True)
        a_head = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        a_rest = (a - (bits & -65536).to(tl.float32, bitcast=True)).to(tl.bfloat16)
        acc = tl.dot(turned(a_rest, TURN), b, acc)
        acc = tl.dot(turned(a_head, TURN), b, acc)
    elif DOT == "tf32":
        acc = dot_tf32(turned(nearest(a), TURN), nearest(b), acc, 1)
    else:
        a_head = head(a)
        a_rest = turned(a - a_head, TURN)
        a_head = turned(a_head, TURN)
        acc = dot_tf32(a_rest, head(b) if DOT == "tf32x3" else b, acc)
        if DOT == "tf32x3":
            b_head = head(b)
            acc = dot_tf32(a_head, b - b_head, acc)
            acc = dot_tf32(a_head, b_head, acc)
        else:
            acc = dot_tf32(a_head, b, acc)
    return acc


@triton.jit
def columns_by_warp(b_tile, ACROSS: tl.constexpr, RUN: tl.constexpr):
    """A tile [BB, N] for a product that sums over columns: [ACROSS, BB, N / ACROSS], one part for every warp of a row.

    Within 8 or 16 columns the function takes the order in which the tensor core reads columns, so every lane already
    has what it needs: RUN neighbours, as the compiler lays out the operands.
    """
    BB: tl.constexpr = b_tile.shape[0]
    N: tl.constexpr = b_tile.shape[1]
    SHAPE: tl.constexpr = [BB, N] if ACROSS == 1 else [ACROSS, BB, N // ACROSS]
    if RUN == 4:
        b_parts = tl.permute(tl.reshape(b_tile, [BB, N // (16 * ACROSS), 2, ACROSS, 4, 2]), (3, 0, 1, 4, 2, 5))
    elif RUN == 2:
        b_parts = tl.permute(tl.reshape(b_tile, [BB, N // (8 * ACROSS), ACROSS, 8]), (2, 0, 1, 3))
    else:
        b_parts = tl.permute(tl.reshape(b_tile, [BB, N // (8 * ACROSS), ACROSS, 4, 2]), (2, 0, 1, 4, 3))
    return tl.reshape(b_parts, SHAPE)


@triton.jit
def weights_by_warp(b_w, ACROSS: tl.constexpr, RUN: tl.constexpr):
    """As columns_by_warp(), for the rows of a weight [N, KP]: [ACROSS, N / ACROSS, KP]."""
    N: tl.constexpr = b_w.shape[0]
    KP: tl.constexpr = b_w.shape[1]
    SHAPE: tl.constexpr = [N, KP] if ACROSS == 1 else [ACROSS, N // ACROSS, KP]
    if RUN == 4:
        b_parts = tl.permute(tl.reshape(b_w, [N // (16 * ACROSS), 2, ACROSS, 4, 2, KP]), (2, 0, 3, 1, 4, 5))
    elif RUN == 2:
        b_parts = tl.permute(tl.reshape(b_w, [N // (8 * ACROSS), ACROSS, 8, KP]), (1, 0, 2, 3))
    else:
        b_parts = tl.permute(tl.reshape(b_w, [N // (8 * ACROSS), ACROSS, 4, 2, KP]), (1, 0, 3, 2, 4))
    return tl.reshape(b_parts, SHAPE)


@triton.jit
def weights_together(b_w, ACROSS: tl.constexpr):
    """The inverse of weights_by_warp() with RUN = 2."""
    M: tl.constexpr = b_w.shape[1]
    KP: tl.constexpr = b_w.shape[2]
    return tl.reshape(tl.permute(tl.reshape(b_w, [ACROSS, M // 8, 8, KP]), (1, 0, 2, 3)), [ACROSS * M, KP])


@triton.jit
def together(b_parts, ACROSS: tl.constexpr):
    """The sum of the parts of all warps of a row."""
    if ACROSS > 1:
        b_parts = tl.sum(b_parts, 0)
    return b_parts


@triton.jit
def votes_to_inputs(b_dx, b_w, b_acc, ACROSS: tl.constexpr, DOT: tl.constexpr, JOINED: tl.constexpr):
    """acc + dx w for a tile of dvotes dx [BB, N] and a weight [N, KP]: [BB, KP], or a part for every warp of a row.
    JOINED: dx was joined from parts(); then the compiler gives a lane twice as many neighbours."""
    # A product of 16-bit operands has to sum over at least 16 columns.
    FITS: tl.constexpr = DOT != "bf16x2" or b_dx.shape[1] // ACROSS >= 16
    LONG: tl.constexpr = 4 if JOINED and DOT == "bf16x2" and FITS else 2
    RUN: tl.constexpr = LONG if b_w.dtype.primitive_bitwidth == 16 else RUN_OF_FLOAT
    b_dx = columns_by_warp(b_dx, ACROSS, RUN)
    b_w = weights_by_warp(b_w if DOT == "bf16x2" and FITS else b_w.to(tl.float32), ACROSS, RUN)
    return product(b_dx, b_w, b_acc, DOT if FITS else "tf32x2")


@triton.jit
def votes_to_weights(b_dx, b_u, ACROSS: tl.constexpr, DOT: tl.constexpr):
    """dx^T u: a tile of dvotes [BB, N] and input capsules [BB, KP] make dW [N, KP]."""
    BB: tl.constexpr = b_dx.shape[0]
    N: tl.constexpr = b_dx.shape[1]
    KP: tl.constexpr = b_u.shape[1]
    if DOT != "bf16x2":
        b_u = b_u.to(tl.float32)
    if ACROSS == 1:
        b_dw = product(b_dx, b_u, tl.zeros([N, KP], tl.float32), DOT, True)
    else:
        # Every warp computes dW for its own columns.
        b_u_warps = tl.broadcast_to(b_u[None, :, :], [ACROSS, BB, KP])
        b_zero = tl.zeros([ACROSS, N // ACROSS, KP], tl.float32)
        b_dw = weights_together(product(columns_by_warp(b_dx, ACROSS, 2), b_u_warps, b_zero, DOT, True), ACROSS)
    return b_dw
