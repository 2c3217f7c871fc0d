// How a call is cut into tasks and tiles; exposed to Python as the launch plan.
#pragma once

#include "passes.h"

namespace capsfast {

// lanes: of a full register for the type sums are formed in; threads: that the call may use.
Plan make_plan(const Problem& p, int64_t lanes, int64_t threads, int64_t bytes_per_number);

// Votes that exist are read once per iteration. Sample by sample, all iterations of one before the next,
// they come from memory once and from the cache after that; a task then has samples of its own, and a
// plan for one thread.
struct Slices {
  int64_t tasks = 0;    // 0: the whole batch at once
  int64_t samples = 0;  // worked on together
};

Slices make_slices(const Problem& p, int64_t threads, int64_t bytes_per_number, bool shared_logits_gradient);

// What the passes of a plan execute, a multiply-add counted as two.
double forward_flops(const Problem& p, const Plan& plan);
double backward_flops(const Problem& p, const Plan& plan);

}  // namespace capsfast
