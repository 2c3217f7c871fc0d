// Forward and backward of routing on a GPU. They launch kernels on torch's current stream and do not wait for them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../routing.h"

namespace capsfast::cuda {

// like: u or votes; new memory comes from its device and allocator. T: the type that sums are formed in.
template <class T>
void forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor& like);
template <class T>
void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
              const torch::stable::Tensor& like);

}  // namespace capsfast::cuda
