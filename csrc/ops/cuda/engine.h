// The Engine (see arguments.h) of CUDA tensors. forward.cu, backward.cu and pass.cu define its functions.
#pragma once

#include "../../cuda/context.h"
#include "../pass_problem.h"

namespace capsfast::cuda {

using torch::stable::Tensor;

struct Engine {
  static constexpr const char* device = "CUDA";
  static constexpr bool kSharedOutputs = false;
  static constexpr bool kPoseMatrices = false;
  static constexpr bool kPositions = false;
  static constexpr bool kFactored = false;
  // A template, because the type is complete only where its header is included.
  template <class AnyTensor>
  static bool holds(const AnyTensor& tensor) {
    return tensor.is_cuda();
  }

  // Forward and backward of routing and of a pass. They launch kernels on torch's current stream and do not wait for
  // them. like: u or votes; new memory comes from its device and allocator. T: the type that sums are formed in.
  template <class T>
  static void forward(const Problem& p, const ForwardOutputs& out, const Tensor& like);
  template <class T>
  static void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out, const Tensor& like);
  template <class T>
  static void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out, const Tensor& like);
  template <class T>
  static void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out,
                            const Tensor& like);
};

}  // namespace capsfast::cuda
