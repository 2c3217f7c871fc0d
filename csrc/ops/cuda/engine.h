// The Engine (see bindings.h) of CUDA tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../pass.h"

namespace capsfast::cuda {

// Forward and backward of routing and of a pass. They launch kernels on torch's current stream and do not wait for
// them. like: u or votes; new memory comes from its device and allocator. T: the type that sums are formed in.
template <class T>
void forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor& like);
template <class T>
void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
              const torch::stable::Tensor& like);
template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out, const torch::stable::Tensor& like);
template <class T>
void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out,
                   const torch::stable::Tensor& like);

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
