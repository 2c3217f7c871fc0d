// The op of routing with one matrix: stable-ABI tensors in, tensors out. It runs on the CPU alone.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "arguments.h"
#include "cpu/engine.h"
#include "cpu/shared_routing.h"
#include "options.h"

namespace capsfast {
namespace bindings {

class SharedOps : Arguments<CpuEngine> {
 public:
  static std::tuple<Tensor, Tensor> shared_routing(
      Tensor u,                 // [B, I, K]
      Tensor weight,            // [1, 1, D, K]
      OptionalTensor logits,    // [I, J] or [B, I, J]
      OptionalTensor mask,      // [B, I]
      OptionalTensor out_mask,  // [B, J]
      int64_t J, int64_t num_iterations, std::string gradient, bool accumulate, double scale, std::string squash,
      double eps, bool return_kept, bool return_all) {
    Call call(u, weight, logits, mask, out_mask, J, {num_iterations, gradient, accumulate, scale, squash, eps});
    SharedProblem& p = call.p;
    p.keep_all = return_all;
    const ScalarType type = u.scalar_type();
    Tensor v = empty(u, {p.B, p.J, p.D}, type),
           kept = return_kept ? empty(u, {p.B, p.kept()}, type) : empty(u, {0}, type);
    if (p.empty()) {
      torch::stable::zero_(v);
      torch::stable::zero_(kept);
      return {v, kept};
    }
    const SharedOutputs out{v.data_ptr(), return_kept ? kept.data_ptr() : nullptr};
    with_team(worth_sharing(p),
              [&] { type == ScalarType::Double ? shared_forward<double>(p, out) : shared_forward<float>(p, out); });
    return {v, kept};
  }

  static std::tuple<Tensor, Tensor, Tensor> shared_routing_backward(
      Tensor dv,  // [B, J, D]
      Tensor u, Tensor weight, OptionalTensor logits, OptionalTensor mask, OptionalTensor out_mask,
      Tensor kept,  // [B, p.kept()]
      int64_t J, int64_t num_iterations, std::string gradient, bool accumulate, double scale, std::string squash,
      double eps, bool need_u, bool need_weight, bool need_logits) {
    Call call(u, weight, logits, mask, out_mask, J, {num_iterations, gradient, accumulate, scale, squash, eps});
    SharedProblem& p = call.p;
    expect("dv", dv, {p.B, p.J, p.D});
    STD_TORCH_CHECK(
        kept.dim() == 2 || p.empty(),
        "capsfast: shared_routing was called with return_kept=False, so that it has no backward; pass True");
    p.keep_all = kept.dim() == 2 && kept.size(1) > p.kept();
    expect("kept", kept, {p.B, p.kept()});
    STD_TORCH_CHECK(dv.scalar_type() == u.scalar_type() && kept.scalar_type() == u.scalar_type(),
                    "capsfast: dv and kept must have the dtype of u");
    SharedGradients out;
    View view;
    Tensor du = gradient_like(u, need_u, p.empty(), &view),
           dweight = gradient_like(weight, need_weight, p.empty(), &view);
    Tensor dlogits = gradient_like(logits.value_or(u), need_logits && logits.has_value(), p.empty(), &out.dlogits);
    out.per_sample_logits = logits.has_value() && logits->dim() == 3;
    if (p.empty()) return {du, dweight, dlogits};
    if (need_u) out.du = du.data_ptr();
    if (need_weight) out.dweight = dweight.data_ptr();
    const Tensor given = torch::stable::contiguous(dv), saved = torch::stable::contiguous(kept);
    with_team(worth_sharing(p), [&] {
      if (u.scalar_type() == ScalarType::Double) {
        shared_backward(
            p, static_cast<const double*>(given.data_ptr()), static_cast<const double*>(saved.data_ptr()), out);
      } else {
        shared_backward(
            p, static_cast<const float*>(given.data_ptr()), static_cast<const float*>(saved.data_ptr()), out);
      }
    });
    return {du, dweight, dlogits};
  }

 private:
  struct Options {
    int64_t num_iterations;
    const std::string& gradient;
    bool accumulate;
    double scale;
    const std::string& squash;
    double eps;
  };

  // The problem, and the tensors that it points to.
  struct Call {
    SharedProblem p;
    Tensor u, weight;

    Call(const Tensor& given, const Tensor& matrix, const OptionalTensor& logits, const OptionalTensor& mask,
         const OptionalTensor& out_mask, int64_t J, const Options& options)
        : u(given.dim() == 3 && given.stride(2) != 1 ? torch::stable::contiguous(given) : given),
          weight(torch::stable::contiguous(matrix)) {
      const ScalarType type = u.scalar_type();
      STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                      "capsfast: shared_routing takes float32 and float64");
      STD_TORCH_CHECK(
          u.dim() == 3 && weight.dim() == 4 && J >= 0, "capsfast: u must be [B, I, K], weight [1, 1, D, K]");
      STD_TORCH_CHECK(options.num_iterations >= 1, "capsfast: num_iterations must be at least 1");
      p.B = u.size(0), p.I = u.size(1), p.J = J, p.D = weight.size(2), p.K = u.size(2);
      expect("weight", weight, {1, 1, p.D, p.K});
      expect("u", u, {p.B, p.I, p.K});
      STD_TORCH_CHECK(weight.scalar_type() == type && (!logits.has_value() || logits->scalar_type() == type),
                      "capsfast: u, weight and logits must have one dtype");
      p.iterations = options.num_iterations;
      p.gradient_last = gradient_last_of(options.gradient);
      p.accumulate = options.accumulate, p.scale = options.scale;
      p.squash = squash_of(options.squash), p.eps = options.eps;
      p.u = view_of(u), p.weight = view_of(weight);
      Problem masks;
      masks.B = p.B, masks.I = p.I, masks.J = p.J;
      add_logits_and_masks(masks, logits, mask, out_mask);
      p.logits = masks.logits, p.mask = masks.mask, p.out_mask = masks.out_mask;
    }
  };

  static bool worth_sharing(const SharedProblem& p) {
    return double(p.B) * double(p.I) * double(p.J) * double(p.K) * double(p.iterations) >= CpuEngine::kShared;
  }
};

}  // namespace bindings

template <class Library>
void register_shared_op(Library& library) {
  library.impl("shared_routing", TORCH_BOX(&bindings::SharedOps::shared_routing));
  library.impl("shared_routing_backward", TORCH_BOX(&bindings::SharedOps::shared_routing_backward));
}

}  // namespace capsfast
