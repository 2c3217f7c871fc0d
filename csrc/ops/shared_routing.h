// The op shared_routing: tensors of the stable ABI in and out. It runs on the CPU alone.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/engine.h"
#include "cpu/shared_routing.h"
#include "options.h"

namespace capsfast {
namespace bindings {

class SharedRouting : Arguments<CpuEngine> {
 public:
  static void forward(Stack& stack) {
    Call call;
    bool return_kept, return_all;
    call.take_tensors(stack);
    call.take_options(stack);
    stack >> return_kept >> return_all;
    SharedProblem p = call.problem();
    p.keep_all = return_all;
    const ScalarType type = call.u.scalar_type();
    Tensor v = empty(call.u, {p.B, p.J, p.D}, type),
           kept = return_kept ? empty(call.u, {p.B, p.kept()}, type) : empty(call.u, {0}, type);
    if (p.empty()) {
      torch::stable::zero_(v);
      torch::stable::zero_(kept);
    } else {
      const SharedOutputs out{v.data_ptr(), return_kept ? kept.data_ptr() : nullptr};
      with_team(worth_sharing(p), [&] { with_type(type, [&](auto zero) { shared_forward<decltype(zero)>(p, out); }); });
    }
    stack.give({v, kept});
  }

  static void backward(Stack& stack) {
    Call call;
    OptionalTensor dv;  // [B, J, D]
    Tensor kept;        // [B, p.kept()]
    stack >> dv;
    call.take_tensors(stack);
    stack >> kept;
    call.take_options(stack);
    const std::vector<bool> needed = stack.needed(3);
    SharedProblem p = call.problem();
    const ScalarType type = call.u.scalar_type();
    if (!dv.has_value()) {
      dv = empty(call.u, {p.B, p.J, p.D}, type);
      torch::stable::zero_(*dv);
    }
    expect("dv", *dv, {p.B, p.J, p.D});
    STD_TORCH_CHECK(
        kept.dim() == 2 || p.empty(),
        "capsfast: shared_routing was called with return_kept=False, so that it has no backward; pass True");
    p.keep_all = kept.dim() == 2 && kept.size(1) > p.kept();
    expect("kept", kept, {p.B, p.kept()});
    STD_TORCH_CHECK(
        dv->scalar_type() == type && kept.scalar_type() == type, "capsfast: dv and kept must have the dtype of u");
    SharedGradients out;
    View du_view, dweight_view;
    const bool of_logits = needed[2] && call.logits.has_value();
    Tensor du = gradient_like(call.u, needed[0], p.empty(), &du_view),
           dweight = gradient_like(call.weight, needed[1], p.empty(), &dweight_view),
           dlogits = gradient_like(call.logits.value_or(call.u), of_logits, p.empty(), &out.dlogits);
    out.per_sample_logits = call.logits.has_value() && call.logits->dim() == 3;
    if (!p.empty()) {
      out.du = du_view.data, out.dweight = dweight_view.data;
      const Tensor given = torch::stable::contiguous(*dv), saved = torch::stable::contiguous(kept);
      with_team(worth_sharing(p), [&] {
        with_type(type, [&](auto zero) {
          using T = decltype(zero);
          shared_backward(p, static_cast<const T*>(given.data_ptr()), static_cast<const T*>(saved.data_ptr()), out);
        });
      });
    }
    stack.give({du, dweight, dlogits});
  }

 private:
  // The arguments, which the problem points to.
  struct Call {
    Tensor u;                 // [B, I, K]
    Tensor weight;            // [1, 1, D, K]
    OptionalTensor logits;    // [I, J] or [B, I, J]
    OptionalTensor mask;      // [B, I]
    OptionalTensor out_mask;  // [B, J]
    int64_t J, num_iterations;
    std::string gradient, squash;
    bool accumulate;
    double scale, eps;

    void take_tensors(Stack& stack) { stack >> u >> weight >> logits >> mask >> out_mask; }
    void take_options(Stack& stack) {
      stack >> J >> num_iterations >> gradient >> accumulate >> scale >> squash >> eps;
    }

    SharedProblem problem() {
      const ScalarType type = u.scalar_type();
      STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                      "capsfast: shared_routing takes float32 and float64");
      STD_TORCH_CHECK(
          u.dim() == 3 && weight.dim() == 4 && J >= 0, "capsfast: u must be [B, I, K], weight [1, 1, D, K]");
      STD_TORCH_CHECK(num_iterations >= 1, "capsfast: num_iterations must be at least 1");
      if (u.stride(2) != 1) u = torch::stable::contiguous(u);
      weight = torch::stable::contiguous(weight);
      SharedProblem p;
      p.B = u.size(0), p.I = u.size(1), p.J = J, p.D = weight.size(2), p.K = u.size(2);
      expect("weight", weight, {1, 1, p.D, p.K});
      expect("u", u, {p.B, p.I, p.K});
      STD_TORCH_CHECK(weight.scalar_type() == type && (!logits.has_value() || logits->scalar_type() == type),
                      "capsfast: u, weight and logits must have one dtype");
      p.iterations = num_iterations;
      p.gradient_last = gradient_last_of(gradient);
      p.accumulate = accumulate, p.scale = scale;
      p.squash = squash_of(squash), p.eps = eps;
      p.u = view_of(u), p.weight = view_of(weight);
      Problem masks;
      masks.B = p.B, masks.I = p.I, masks.J = p.J;
      add_logits_and_masks(masks, logits, mask, out_mask);
      p.logits = masks.logits, p.mask = masks.mask, p.out_mask = masks.out_mask;
      return p;
    }
  };

  static bool worth_sharing(const SharedProblem& p) {
    return double(p.B) * double(p.I) * double(p.J) * double(p.K) * double(p.iterations) >= CpuEngine::kShared;
  }
};

}  // namespace bindings

template <class Library>
void register_shared_routing(Library& library) {
  library.impl("shared_routing", &bindings::boxed<bindings::SharedRouting::forward>);
  library.impl("shared_routing_backward", &bindings::boxed<bindings::SharedRouting::backward>);
}

}  // namespace capsfast
