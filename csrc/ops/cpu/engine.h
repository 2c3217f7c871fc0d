// The Engine (see arguments.h) of CPU tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "../../cpu/parallel.h"
#include "../pass_problem.h"
#include "../problem.h"

namespace capsfast {

// Forward and backward of routing and of a pass. T is the type that sums are formed in.
template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out);
template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out);
template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out);
template <class T>
void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out);

// Routing without votes. The Problem has shared_weight, and shared_outputs if all j share one W. The op keeps z [r, B,
// J, K] instead of s.
template <class T>
void factored_forward(const Problem& p, const ForwardOutputs& out);
template <class T>
void factored_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out);

struct CpuEngine {
  static constexpr const char* device = "CPU";
  static constexpr bool kSharedOutputs = true;
  static constexpr bool kPoseMatrices = true;
  static constexpr bool kPositions = true;
  static constexpr bool kFactored = false;  // dynamic_routing without votes (see factored_kernels.h)
  // Calls with fewer multiply-adds stay on one thread: waking another thread takes longer than the work.
  static constexpr double kShared = 64 * 1024;

  static bool worth_sharing(const Problem& p) {
    return double(p.samples()) * double(p.I) * double(p.J) * double(p.D) * double(p.K) * double(p.iterations) >=
           kShared;
  }

  // With 0 positions there is nothing to do. Without samples or capsules outputs may still be written.
  template <class F>
  static void run(const Problem& p, const F& call) {
    if (p.positions != 0) with_team(worth_sharing(p), call);
  }

  static bool holds(const torch::stable::Tensor& tensor) { return tensor.is_cpu(); }

  template <class T>
  static void forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor&) {
    run(p, [&] { routing_forward<T>(p, out); });
  }
  template <class T>
  static void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
                       const torch::stable::Tensor&) {
    run(p, [&] { routing_backward<T>(p, in, out); });
  }
  template <class T>
  static void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out,
                           const torch::stable::Tensor&) {
    run(p, [&] { capsfast::pass_forward<T>(p, in, out); });
  }
  template <class T>
  static void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out,
                            const torch::stable::Tensor&) {
    run(p, [&] { capsfast::pass_backward<T>(p, in, saved, out); });
  }
};

struct FactoredEngine : CpuEngine {
  static constexpr bool kPoseMatrices = false;
  static constexpr bool kFactored = true;

  template <class F>
  static void run(const Problem& p, const F& call) {
    const double products = double(p.B) * double(p.I) * double(p.J) * double(p.K) * double(p.iterations);
    if (!p.empty()) with_team(products >= kShared, call);
  }
  template <class T>
  static void forward(const Problem& p, const ForwardOutputs& out, const torch::stable::Tensor&) {
    run(p, [&] { factored_forward<T>(p, out); });
  }
  template <class T>
  static void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out,
                       const torch::stable::Tensor&) {
    run(p, [&] { factored_backward<T>(p, in, out); });
  }
};

}  // namespace capsfast
