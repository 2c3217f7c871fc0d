"""How exact a result must be: its error may be twice the error of the plain definition in the same dtype.

A fixed tolerance hides a missing gradient when gradients are small, and fails by an ulp when they are large. So every
result is compared with the float64 truth. Its largest error and its relative L2 error are compared with the errors of
the einsum reference in the dtype of the inputs (the criterion of flash-attention). The error of a short float32 sum is
a matter of luck. So the reference runs three times and its largest error counts: unchanged, with all axes but the batch
reversed, and with inputs an ulp off, which shows how much the problem magnifies a rounding.

Two more checks cover the whole tensor (from gsplat): the cosine to the truth and the signed bias. They find a few wrong
elements, and many elements that are slightly wrong in one direction.
"""

import torch
from torch import Tensor

from .backends import Backend
from .problems import Problem, nudged, reordered, reverse, run

# In float64 the only truth is the same definition in the same dtype.
DOUBLE = 1e-10
COSINE = {torch.float32: 0.999, torch.bfloat16: 0.98, torch.float16: 0.98}


def ulps(dtype: torch.dtype) -> float:
    """The relative error that is always allowed: a short sum may be exact in the reference by luck.

    A few roundings in float32. In 16 bits only the rounding of the result, because sums are formed in float32.
    """
    return (4 if dtype == torch.float32 else 1) * float(torch.finfo(dtype).eps)


def rounding_floor(x: Tensor) -> float:
    """What one more rounding may cost: `2 |x + 0.3 - 0.3 - x|` in the dtype of x, and its ulps."""
    wobble, size = float((x + 0.3 - 0.3 - x).abs().max()), float(x.abs().max())
    return 2 * wobble + ulps(x.dtype) * size


def relative_l2(value: Tensor, truth: Tensor) -> float:
    norm = truth.norm().item()
    return (value - truth).norm().item() / norm if norm else value.norm().item()


def cosine_to(truth: Tensor, value: Tensor) -> float:
    return torch.cosine_similarity(value.flatten(), truth.flatten(), dim=0, eps=0.0).item()


def assert_accurate(name: str, got: Tensor, truth: Tensor, *plain: Tensor, slack: float = 1) -> None:
    """truth: float64. plain: results of the einsum reference in the dtype of got; the largest error counts."""
    assert got.shape == truth.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(truth.shape)}"
    assert got.dtype == plain[0].dtype, f"{name}: {got.dtype}, expected {plain[0].dtype}"
    if got.numel() == 0:
        return
    assert bool(torch.isfinite(truth).all()), f"{name}: the truth is not finite, a bad test"
    wide = got.cpu().double()
    error, plain_errors = wide - truth, [value.cpu().double() - truth for value in plain]
    worst, size = error.abs().max().item(), truth.abs().max().item()
    if got.dtype == torch.float64:
        assert worst <= DOUBLE * size + 1e-12, f"{name}: off by {worst:.2e} where values reach {size:.2e}"
        return

    # Even a small gradient holds differences dc - sum(c dc) of float32 numbers of order one.
    least = torch.finfo(torch.float32).eps if name.startswith("d") else 0.0
    floor = slack * (rounding_floor(plain[0].cpu()) + least)
    allowed = slack * 2 * max(value.abs().max().item() for value in plain_errors) + floor
    # "not <=" and not ">": NaN must fail.
    assert worst <= allowed, f"{name}: largest error {worst:.2e}, allowed {allowed:.2e}, values reach {size:.2e}"
    if size <= floor:
        return  # only rounding errors, which have no direction
    norm = truth.norm().item()
    least *= got.numel() ** 0.5
    found = error.norm().item() / norm
    limit = slack * (2 * max(value.norm().item() for value in plain_errors) + least) / norm + slack * ulps(got.dtype)
    assert found <= limit, f"{name}: relative L2 error {found:.2e}, allowed {limit:.2e}"
    cosine, plain_cosine = cosine_to(truth, wide), min(cosine_to(truth, truth + value) for value in plain_errors)
    assert cosine >= min(COSINE[got.dtype], plain_cosine), f"{name}: cosine to the truth {cosine}"
    if error.numel() < 64:
        return  # too few to tell a bias from noise
    bias, plain_bias = abs(error.mean().item()), max(abs(value.mean().item()) for value in plain_errors)
    noise = 4 * error.std(unbiased=False).item() / error.numel() ** 0.5
    # All elements may share one factor that is an ulp off. Roundings to 16 bits are independent and cancel.
    common = ulps(got.dtype) / (1 if got.dtype == torch.float32 else 8)
    drift = 2 * plain_bias + noise + common * truth.abs().mean().item()
    assert bias <= slack * drift, f"{name}: signed bias {bias:.2e}, allowed {slack * drift:.2e}"


def check_scores(problem: Problem, backend: Backend) -> None:
    """Gradients of scores are off by 1e-6 of the largest plus 1e-12 at most."""
    got, truth = run(problem, backend.name), run(problem.to(torch.float64), "reference")
    for name in got.keys() & {"dlogits", "dquery", "dprecision", "dprior"}:
        worst, size = (got[name].cpu().double() - truth[name]).abs().max().item(), truth[name].abs().max().item()
        assert worst <= 1e-6 * size + 1e-12, f"{name}: largest error {worst:.2e}, values reach {size:.2e}"


def assert_close(got: Tensor, wanted: Tensor, double: float = DOUBLE) -> None:
    """Compares two ways to one result, in the widest dtype of a backend. ``double``: the tolerance in float64."""
    rtol, atol = (double, double / 100) if got.dtype == torch.float64 else (2e-4, 2e-5)
    torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol)


def plain_results(problem: Problem) -> list[dict[str, Tensor]]:
    """The results of the einsum reference in the dtype of the problem."""
    found = [run(problem, "reference")]
    if problem.dtype == torch.float32:
        backwards = run(reordered(problem), "reference")
        found.append({name: reverse(name, value) for name, value in backwards.items()})
        found.append(run(nudged(problem), "reference"))
    return found


def check(problem: Problem, backend: Backend, slack: float = 2) -> dict[str, Tensor]:
    """Runs the problem on the backend; outputs and all gradients must be accurate.

    slack: factor on all bounds. 1 for problems of real size. The default is for small problems, whose largest error is
    a matter of luck. More for random problems, some of which the reference solves without any error.
    """
    got = run(problem, backend.name)
    truth = run(problem.to(torch.float64), "reference")
    plain = [truth] if problem.dtype == torch.float64 else plain_results(problem.to(problem.dtype))
    assert got.keys() == truth.keys()
    for name, value in got.items():
        assert_accurate(name, value, truth[name], *(results[name] for results in plain), slack=slack)
    return got
