"""The first statement of every kernel: programmatic dependent launch (PDL), see Plan.finish().

With PDL a kernel may start before the kernel in front of it has ended. The rule that keeps every value right: no kernel
touches memory before begin(). There it waits until the kernel in front has ended and its memory is visible, and only
then lets the kernel behind start. So when a kernel starts, all kernels but the one in front have ended, and when it
leaves begin(), that one has ended too: it may read what any of them wrote, and overwrite what any of them read.
"""

import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
