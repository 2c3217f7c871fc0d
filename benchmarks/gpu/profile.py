"""A step: reports of ncu for its window, the same as text, and before it where to look in them."""

import argparse
from pathlib import Path

from . import ncu
from .kernels import MODES

GUIDE = """Profiles of the rows kernels on the canonical layer, B=128, made by ncu, which leaves the clocks as they are.

profile-apart.ncu-rep     a launch for each pass: float32, then bfloat16. Of each three accumulate_kernel<.., false> of
                          the forward, the first without logits, two accumulate_kernel<.., true>, gradient_kernel
profile-together.ncu-rep  float32, all passes of a direction in one launch
Open them with ncu-ui; below this is what `ncu --import FILE --page details` says of them. The table "Kernels" in
check.md has what launches take without ncu, and beside it the least by counts of the code.

Question                           Section: what answers it
What bounds it: issue?             Scheduler Statistics: "Issued Warp Per Scheduler" near 1, "No Eligible" near 0.
  L1/shared?                       Memory Workload Analysis: "Mem Pipes Busy" and "L1/TEX Hit Rate"; raw page:
                                   l1tex__data_pipe_lsu_wavefronts, percent of peak. Near 90 % nothing but fewer or
                                   wider accesses helps. Warp State: "Stall MIO Throttle", "Stall Short Scoreboard".
  tensor cores?                    Compute Workload Analysis: pipe "Tensor". Warp State: "Stall Math Pipe Throttle".
  latency?                         None of the three above 60 % and "No Eligible" high. Warp State then says of what:
                                   Long Scoreboard: V, ds from L1 or L2, weights and poses from L2 or memory;
                                   Short Scoreboard: shared memory, shuffles; Wait, Dispatch: dependent instructions;
                                   Barrier: warps wait for a chunk; Membar, or Sleeping and Branch Resolving in a
                                   loop that reads one address: grid barrier.
Do the counts hold?                Instruction Statistics: "Executed Instructions" against the counts in predicted.py
                                   (tiles of 16 samples x input capsules x count). More: look at the source page by
                                   "Instructions Executed" for the lines beside the main loop.
Spills?                            Launch Statistics: "Registers Per Thread"; Memory Tables, L1/TEX: the rows "Local
                                   Load" and "Local Store" must be 0. Without a GPU: cuobjdump --dump-resource-usage.
Bank conflicts of LDS.64/128       Memory Tables, Shared Memory: "Bank Conflicts" beside "Wavefronts" of the row
(weights, poses)?                  "Shared Load". Source page, by SASS: "L1 Wavefronts Shared" above "... Shared
                                   Ideal" names the load. An LDS.64 of a warp takes 2 wavefronts, an LDS.128 takes 4.
Do V and ds stay in L1?            Memory Tables, L1/TEX: "Hit Rate" of the row "Global Load"; misses times 32 bytes
                                   against what V and ds are, 4 x B x J x D bytes an iteration.
Tail, waves?                       Launch Statistics: "Waves Per SM" is at most 1 by design. Workload distribution:
                                   minimum and maximum of active cycles of the multiprocessors far apart means that
                                   some blocks have more, or that clusters left multiprocessors empty.
Time at the grid barrier?          Duration of a launch with all passes less those of its passes apart and of the steps
                                   between them (table "Kernels" in check.md); in profile-together the stall samples
                                   of the loop at the barrier on the source page.
L2 and memory?                     Memory Chart: bytes from device memory against weight + poses of one pass; more
                                   means that passes do not find them in L2. Caches are flushed before a kernel.
"""

# What is run in the order of what it tells.
REPORTS = {"apart": "dtypes", "together": "canonical"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ncu", required=True, help="the program")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the reports")
    asked = parser.parse_args()
    clock = ncu.Clock()
    text = asked.out / "profile.txt"
    text.write_text(GUIDE)
    bad = []
    for mode, layers in REPORTS.items():
        report = asked.out / f"profile-{mode}.ncu-rep"
        command = [*ncu.words(asked.ncu), "--set", "full", "--force-overwrite", "-o", str(report)]
        try:
            ncu.call([*command, *ncu.watched(layers)], clock.left, {"CAPSFAST_COOPERATIVE": MODES[mode]})
            details = ncu.call([asked.ncu, "--import", str(report), "--page", "details"], clock.left)
        except RuntimeError as error:
            bad.append(f"{mode}: {error}")
            continue
        with text.open("a") as file:
            file.write(f"\n{'=' * 40} {report.name}\n\n{details}")
        print(f"{report.name}: {report.stat().st_size / 2**20:.1f} MiB", flush=True)
    if bad:
        raise SystemExit("; ".join(bad))


if __name__ == "__main__":
    main()
