// Routing by the columns family: `dynamic_routing` on tensor cores.
#pragma once

#include "../../../cuda/context.h"
#include "../../problem.h"

namespace capsfast::cuda::columns {

// Runs a call that the columns family serves (family.h) and returns true, or returns false without a launch if no block
// of threads fits shared memory.
bool forward(const Problem& p, const ForwardOutputs& out, const gpu::Context& context);
bool backward(const Problem& p, const BackwardInputs& inputs, const BackwardOutputs& out, const gpu::Context& context);

}  // namespace capsfast::cuda::columns
