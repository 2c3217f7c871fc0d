"""The FLOPs that a contender executes on the CPU, votes that it makes again included, where it can say so."""

from .. import native
from .cases import Case
from .contenders import OURS

CPP = OURS + "cpp"


def executed_flops(case: Case, contender: str) -> float | None:
    """Of one call with this process's threads and instruction set; None for contenders that do not tell."""
    if contender != CPP or native.extension is None or case.routing:
        return None
    plan = native.extension.launch_plan(
        case.B,
        case.I,
        case.J,
        case.D,
        max(case.K, 1),
        case.r,
        votes_given=case.op == "route_votes",
        itemsize=case.torch_dtype.itemsize,
    )
    return float(plan["forward_flops"]) + (float(plan["backward_flops"]) if case.backward else 0.0)
