"""The squash v = f(n) s with n = |s|^2, on rows [R, DP]. reference/squash.py holds the same factors f."""

import triton
import triton.language as tl


@triton.jit
def minus_expm1(x):
    """1 - exp(-x) for x >= 0, by its series for small x, where the difference would cancel."""
    series = x * (1.0 - x * (0.5 - x * (1.0 / 6.0 - x * (1.0 / 24.0 - x * (1.0 / 120.0)))))
    return tl.where(x < 0.1, series, 1.0 - tl.exp(-x))


@triton.jit
def radial(n, eps, KIND: tl.constexpr):
    """f(n)."""
    if KIND == "paper":
        f = n / (1.0 + n) / tl.sqrt_rn(n + eps)
    elif KIND == "half":
        f = n / (0.5 + n) / tl.sqrt_rn(n + eps)
    elif KIND == "eps_outside":
        f = n / (1.0 + n) / (tl.sqrt_rn(n) + eps)
    elif KIND == "exp":
        norm = tl.sqrt_rn(n + eps)
        f = minus_expm1(norm) / norm
    elif KIND == "unit":
        f = 1.0 / tl.sqrt_rn(n + eps)
    else:
        tl.static_assert(KIND == "identity")
        f = tl.full(n.shape, 1.0, tl.float32)
    return f


@triton.jit
def radial_slope(n, eps, s_dv, KIND: tl.constexpr):
    """2 s_dv df/dn, 0 at n = 0 for every kind. csrc/math/squash.h says why the products have this order."""
    if KIND == "paper" or KIND == "half":
        least: tl.constexpr = 1.0 if KIND == "paper" else 0.5
        q = 1.0 / (least + n)
        slope = s_dv * q / tl.sqrt_rn(n + eps) * (2.0 * least * q - n / (n + eps))
    elif KIND == "eps_outside":
        root = tl.sqrt_rn(n)
        q = 1.0 / (1.0 + n)
        p = 1.0 / (root + eps)
        slope = s_dv * q * p * (2.0 * q - root * p)
    elif KIND == "exp":
        norm = tl.sqrt_rn(n + eps)
        # (exp(-x) x - (1 - exp(-x))) / x^2, by its series for small x, where the difference would cancel.
        series = -0.5 + norm * (1.0 / 3.0 - norm * (1.0 / 8.0 - norm * (1.0 / 30.0 - norm * (1.0 / 144.0))))
        exact = (tl.exp(-norm) * norm - minus_expm1(norm)) / norm / norm
        slope = s_dv / norm * tl.where(norm < 0.1, series, exact)
    elif KIND == "unit":
        root = tl.sqrt_rn(n + eps)
        slope = -(s_dv / root / root / root)
    else:
        tl.static_assert(KIND == "identity")
        slope = tl.zeros(n.shape, tl.float32)
    return slope


@triton.jit
def squash(s, eps, KIND: tl.constexpr):
    return radial(tl.sum(s * s, 1), eps, KIND)[:, None] * s


@triton.jit
def squash_gradient(s, dv, eps, KIND: tl.constexpr):
    """ds from dv for v = f(|s|^2) s."""
    n = tl.sum(s * s, 1)
    along = radial_slope(n, eps, tl.sum(s * dv, 1), KIND)
    return radial(n, eps, KIND)[:, None] * dv + along[:, None] * s
