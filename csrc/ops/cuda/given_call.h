// Calls of route_votes whose samples fit the shared memory of a cluster: one launch, where others take one a pass.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../routing.h"

namespace capsfast::cuda {

// False: the resident kernels do not serve the call, and nothing was done.
bool resident_forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor& like);
bool resident_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
                       const torch::stable::Tensor& like);

}  // namespace capsfast::cuda
