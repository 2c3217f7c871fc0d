// The Engine (see bindings.h) of CUDA tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "pass.h"
#include "routing.h"

namespace capsfast::cuda {

struct Engine {
  static constexpr const char* device = "CUDA";
  static constexpr bool kSharedOutputs = false;
  static constexpr bool kPoseMatrices = false;
  static constexpr bool kPositions = false;
  static bool holds(const torch::stable::Tensor& tensor) { return tensor.is_cuda(); }

  template <class T>
  static void forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor& like) {
    cuda::forward<T>(p, out, like);
  }
  template <class T>
  static void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
                       const torch::stable::Tensor& like) {
    cuda::backward<T>(p, in, out, like);
  }
  template <class T>
  static void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out,
                           const torch::stable::Tensor& like) {
    cuda::pass_forward<T>(p, in, out, like);
  }
  template <class T>
  static void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out,
                            const torch::stable::Tensor& like) {
    cuda::pass_backward<T>(p, in, saved, out, like);
  }
};

}  // namespace capsfast::cuda
