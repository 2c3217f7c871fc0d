// Calls of route_votes in one launch, if a sample fits the shared memory of a cluster. Else the general kernels, which
// take one for each pass, serve them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../../routing.h"

namespace capsfast::cuda {

// False if the kernels for votes do not serve the call; then nothing was launched.
bool votes_forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor& like);
bool votes_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
                    const torch::stable::Tensor& like);

}  // namespace capsfast::cuda
