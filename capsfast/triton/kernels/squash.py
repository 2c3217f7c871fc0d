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
def radial_derivative(n, eps, KIND: tl.constexpr):
    """df/dn; finite at n = 0 for every kind."""
    if KIND == "paper" or KIND == "half":
        least: tl.constexpr = 1.0 if KIND == "paper" else 0.5
        root = tl.sqrt_rn(n + eps)
        q = 1.0 / (least + n)
        f = least * q * q / root - n * q / (2.0 * root * root * root)
    elif KIND == "eps_outside":
        root = tl.sqrt_rn(n)
        q = 1.0 / (1.0 + n)
        p = 1.0 / (root + eps)
        f = q * q * p - q * root * p * p / 2.0
    elif KIND == "exp":
        norm = tl.sqrt_rn(n + eps)
        # (exp(-x) x - (1 - exp(-x))) / (2 x^3), by its series for small x, where the difference would cancel.
        series = -0.25 + norm * (1.0 / 6.0 - norm * (1.0 / 16.0 - norm * (1.0 / 60.0 - norm * (1.0 / 288.0))))
        exact = (tl.exp(-norm) * norm - minus_expm1(norm)) / (2.0 * norm * norm * norm)
        f = tl.where(norm < 0.1, series / norm, exact)
    elif KIND == "unit":
        root = tl.sqrt_rn(n + eps)
        f = -0.5 / (root * root * root)
    else:
        tl.static_assert(KIND == "identity")
        f = tl.zeros(n.shape, tl.float32)
    return f


@triton.jit
def squash(s, eps, KIND: tl.constexpr):
    return radial(tl.sum(s * s, 1), eps, KIND)[:, None] * s


@triton.jit
def squash_gradient(s, dv, eps, KIND: tl.constexpr):
    """ds from dv for v = f(|s|^2) s."""
    n = tl.sum(s * s, 1)
    along = 2.0 * radial_derivative(n, eps, KIND) * tl.sum(s * dv, 1)
    return radial(n, eps, KIND)[:, None] * dv + along[:, None] * s
