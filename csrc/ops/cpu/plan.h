// How a call is cut into tasks and tiles; exposed to Python as the launch plan.
#pragma once

#include "passes.h"

namespace capsfast {

// lanes: of a full register for the type sums are formed in; threads: that the call may use.
Plan make_plan(const Problem& p, int64_t lanes, int64_t threads, int64_t bytes_per_number);

// Multiply-adds times two of the forward, and of the backward after it.
double forward_flops(const Problem& p);
double backward_flops(const Problem& p);

}  // namespace capsfast
