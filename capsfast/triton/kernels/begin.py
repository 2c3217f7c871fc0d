"""The first statement of every kernel of a plan: programmatic dependent launch (PDL), see Plan.finish().

With PDL a kernel may start before the kernel in front of it has ended. The rule that keeps every value right: no kernel
touches memory before begin(). In begin(), a kernel waits until the kernel in front has ended and its memory is visible.
Only then may the kernel behind start. So when a kernel starts, all kernels except the kernel in front have ended. When
a kernel leaves begin(), all earlier kernels have ended: it may read what they wrote, and overwrite what they read.
"""

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
