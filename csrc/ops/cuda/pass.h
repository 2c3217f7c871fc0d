// Forward and backward of a pass on a GPU, as those of routing.h. The kernels serve the linear pass: what it lacks
// against pass.h is an error.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../pass.h"

namespace capsfast::cuda {

template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out, const torch::stable::Tensor& like);
template <class T>
void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out,
                   const torch::stable::Tensor& like);

}  // namespace capsfast::cuda
