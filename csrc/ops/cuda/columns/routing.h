// Routing by the columns family: `dynamic_routing` on tensor cores.
#pragma once

#include "../../../cuda/context.h"
#include "../../routing.h"

namespace capsfast::cuda::columns {

// Runs the call and returns true, or returns false without a launch if the columns family does not serve it. The rows
// family goes first where it serves a call, unless context.columns_first.
bool forward(const Problem& p, const ForwardOutputs& out, const gpu::Context& context);
bool backward(const Problem& p, const BackwardInputs& inputs, const BackwardOutputs& out, const gpu::Context& context);

}  // namespace capsfast::cuda::columns
