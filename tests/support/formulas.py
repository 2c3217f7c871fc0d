"""The forward and backward passes that the fused kernels run, as tensor operations.

Only V_t and s_t [B, J, D] pass from one loop over the input capsules to the next. Where ``votes()`` is called below, a
kernel makes the votes again on chip.
"""

import torch
from torch import Tensor

EPS = 1e-8


def squash(s: Tensor) -> Tensor:
    n = (s * s).sum(-1, keepdim=True)
    return n / (1 + n) * s / torch.sqrt(n + EPS)


def squash_backward(s: Tensor, dv: Tensor) -> Tensor:
    """ds for v = f(n) s with f(n) = n / (1 + n) / sqrt(n + eps)."""
    n = (s * s).sum(-1, keepdim=True)
    root = torch.sqrt(n + EPS)
    f = n / (1 + n) / root
    df = 1 / (1 + n) ** 2 / root - 0.5 * n / (1 + n) / root**3
    return f * dv + 2 * df * (s * dv).sum(-1, keepdim=True) * s


def fused(
    u: Tensor, w: Tensor, logits: Tensor, r: int, dv: Tensor, gradient: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v, du, dw and dlogits from u [B, I, K], w [I, J, D, K], logits [I, J] and dv [B, J, D]."""

    def votes() -> Tensor:
        return torch.einsum("ijdk,bik->bijd", w, u)

    def couple(x: Tensor, total: Tensor) -> Tensor:
        return torch.softmax(logits + torch.einsum("bijd,bjd->bij", x, total), 2)

    def agreement_backward(x: Tensor, c: Tensor, ds: Tensor) -> Tensor:
        dc = torch.einsum("bijd,bjd->bij", x, ds)
        return c * (dc - (c * dc).sum(2, keepdim=True))

    V, s = [torch.zeros_like(dv)], []
    for t in range(r):
        x = votes()
        s.append(torch.einsum("bij,bijd->bjd", couple(x, V[t]), x))
        V.append(V[t] + squash(s[t]))
    v = squash(s[-1])

    ds = [torch.zeros_like(dv)] * r
    ds[-1] = squash_backward(s[-1], dv)
    first = r - 1 if gradient == "last" else 0
    G = torch.zeros_like(dv)
    for t in range(r - 1, first, -1):
        x = votes()
        db = agreement_backward(x, couple(x, V[t]), ds[t])
        G = G + torch.einsum("bij,bijd->bjd", db, x)  # V_t feeds pass t and V_{t+1}
        ds[t - 1] = squash_backward(s[t - 1], G)

    x = votes()
    dx, dlogits = torch.zeros_like(x), torch.zeros_like(logits)
    for t in range(first, r):
        c = couple(x, V[t])
        db = agreement_backward(x, c, ds[t])
        dx = dx + c[..., None] * ds[t][:, None]
        dlogits = dlogits + db.sum(0)
        if gradient == "full":
            dx = dx + db[..., None] * V[t][:, None]  # V_0 = 0
    return v, torch.einsum("bijd,ijdk->bik", dx, w), torch.einsum("bijd,bik->ijdk", dx, u), dlogits
