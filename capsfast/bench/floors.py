"""The least time a GPU needs for a case, by its measured rates.

Three resources work beside each other, so the floor is the longest of three times and no sum of them:

* bytes: every input read once, every output written once, at the rate of a copy;
* products of matrices (votes, du, dW) at the rate of the tensor cores. In float32 each takes three TF32 products;
* the other sums (agreement, weighted sums, their gradients) at the rate of float32 arithmetic.

Counted are votes that are made again in every pass, as nobody keeps them: docs/routing.md.
"""

from typing import NamedTuple

from .cases import Case

TF32_PRODUCTS = 3


class Floor(NamedTuple):
    """Seconds by resource."""

    copy: float
    tensor: float
    vector: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def limiting(self) -> str:
        return self._fields[self.index(self.seconds)]


def moved_bytes(case: Case) -> int:
    """Of the forward: inputs and v. The backward reads them again with dv and writes the gradients."""
    forward = case.input_bytes + case.output_bytes
    return 2 * forward + case.gradient_bytes if case.backward else forward


def tensor_flops(case: Case) -> int:
    """r evaluations of the votes; backward: one a pass, r in all, and du and dW."""
    votes = 2 * case.B * case.I * case.J * case.D * case.K
    return votes * (2 * case.r + 2 if case.backward else case.r)


def vector_flops(case: Case) -> int:
    """r weighted sums, r - 1 agreements. Backward, for all iterations but the first: agreement, its gradient and
    the weighted sum G in a pass of its own, then agreement, its gradient and two terms of the votes' gradient; of
    the first iteration one term.
    """
    one = 2 * case.B * case.I * case.J * case.D
    forward = one * (2 * case.r - 1)
    return forward + one * (7 * (case.r - 1) + 1) if case.backward else forward


def floor(case: Case, limits: dict[str, float]) -> Floor | None:
    """None without the rates of a GPU, for float64, and for a routing of capsfast.nn."""
    if "tf32_flops_per_second" not in limits or case.dtype == "float64" or case.routing:
        return None
    rate = (
        limits["tf32_flops_per_second"] / TF32_PRODUCTS if case.dtype == "float32" else limits["bf16_flops_per_second"]
    )
    return Floor(
        moved_bytes(case) / limits["copy_bytes_per_second"],
        tensor_flops(case) / rate,
        vector_flops(case) / limits["matmul_flops_per_second"],
    )
