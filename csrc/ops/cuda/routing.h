// Forward and backward of routing on a GPU: the launches of a call, on torch's stream, without waiting for them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../routing.h"

namespace capsfast::cuda {

// like: where memory comes from, u or votes. T: what sums are formed in.
template <class T>
void forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor& like);
template <class T>
void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
              const torch::stable::Tensor& like);

}  // namespace capsfast::cuda
