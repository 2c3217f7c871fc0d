// The routing ops: stable-ABI tensors in, tensors out.
//
// An Engine is where the ops run. It has the device's name `device`, `holds(tensor)`, `forward<T>` and `backward<T>`,
// where T is the type that sums are formed in. These take the problem, its outputs (the backward its inputs as well)
// and a tensor `like` whose device and allocator new memory comes from.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "arguments.h"
#include "options.h"
#include "routing.h"

namespace capsfast {

// Increased with every change of the signatures below. capsfast/native.py compares it with its BINDINGS, so that a
// library that was built for other signatures is refused instead of called with the wrong arguments.
constexpr int kBindings = 7;

namespace bindings {

struct Options {
  int64_t num_iterations;
  const std::string &softmax, &gradient;
  bool leaky;
  const std::string& squash;
  double eps;
};

struct Saved {
  const Tensor& dv;
  const OptionalTensor& dcoupling;
  const Tensor &coupling, &s, &norm;
};

template <class Engine>
class Ops : Arguments<Engine> {
  using Arguments<Engine>::add_logits_and_masks, Arguments<Engine>::expect, Arguments<Engine>::problem_of;

 public:
  static std::tuple<Tensor, Tensor, Tensor, Tensor> dynamic_routing(
      Tensor u,                 // [B, I, P K]
      Tensor weight,            // [I or 1, J, R, K]
      OptionalTensor logits,    // [I, J] or [B, I, J]
      OptionalTensor bias,      // [J, D]
      OptionalTensor mask,      // [B, I]
      OptionalTensor out_mask,  // [B, J]
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps,
      bool tf32, bool return_coupling) {
    Problem p = problem_of(u, weight);
    p.tf32 = tf32;
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    return forward(p, u, return_coupling);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> dynamic_routing_backward(
      Tensor dv,                 // [B, J, D]
      OptionalTensor dcoupling,  // [B, I, J]
      Tensor u, Tensor weight, OptionalTensor logits, OptionalTensor bias, OptionalTensor mask, OptionalTensor out_mask,
      Tensor coupling,  // [B, I, J], or empty
      Tensor s,         // [r, B, J, D]
      Tensor norm,      // [2, r, B, J], or empty
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps,
      bool tf32, bool need_u, bool need_weight, bool need_logits, bool need_bias) {
    Problem p = problem_of(u, weight);
    p.tf32 = tf32;
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    BackwardOutputs out;
    Tensor du = gradient_like(u, need_u, p.empty(), &out.du);
    Tensor dweight = gradient_like(weight, need_weight, p.empty(), &out.dweight);
    Tensor dlogits = gradient_like(logits.value_or(u), need_logits && logits.has_value(), p.empty(), &out.dlogits);
    Tensor dbias = gradient_like(bias.value_or(u), need_bias && bias.has_value(), p.empty(), &out.dbias);
    out.per_sample_logits = logits.has_value() && logits->dim() == 3;
    out.weight_rows = weight.size(0);
    backward(p, u, {dv, dcoupling, coupling, s, norm}, out);
    return {du, dweight, dlogits, dbias};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> route_votes(
      Tensor votes,  // [B, I, J or 1, D], or [B, I, J, D, S]
      OptionalTensor logits, OptionalTensor bias, OptionalTensor mask, OptionalTensor out_mask, int64_t J,
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps,
      bool return_coupling) {
    Problem p = problem_of(votes, J);
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    return forward(p, votes, return_coupling);
  }

  static std::tuple<Tensor, Tensor, Tensor> route_votes_backward(
      Tensor dv, OptionalTensor dcoupling, Tensor votes, OptionalTensor logits, OptionalTensor bias,
      OptionalTensor mask, OptionalTensor out_mask, Tensor coupling, Tensor s, Tensor norm, int64_t J,
      int64_t num_iterations, std::string softmax, std::string gradient, bool leaky, std::string squash, double eps,
      bool need_votes, bool need_logits, bool need_bias) {
    Problem p = problem_of(votes, J);
    fill(p, {num_iterations, softmax, gradient, leaky, squash, eps}, logits, bias, mask, out_mask);
    BackwardOutputs out;
    const bool positions = p.positions >= 0, per_sample = logits.has_value() && logits->dim() > 2;
    Tensor dvotes = gradient_like(votes, need_votes, p.empty(), &out.dweight, positions, false);
    Tensor dlogits = gradient_like(
        logits.value_or(votes), need_logits && logits.has_value(), p.empty(), &out.dlogits, positions && per_sample);
    Tensor dbias = gradient_like(bias.value_or(votes), need_bias && bias.has_value(), p.empty(), &out.dbias);
    out.per_sample_logits = per_sample;
    backward(p, votes, {dv, dcoupling, coupling, s, norm}, out);
    return {dvotes, dlogits, dbias};
  }

 private:
  // Fills in everything but u, weight and votes. The sizes in p are set already.
  static void fill(Problem& p, const Options& options, const OptionalTensor& logits, const OptionalTensor& bias,
                   const OptionalTensor& mask, const OptionalTensor& out_mask) {
    STD_TORCH_CHECK(options.num_iterations >= 1, "capsfast: num_iterations must be at least 1");
    p.iterations = options.num_iterations;
    p.normalize = softmax_of(options.softmax);
    p.gradient_last = gradient_last_of(options.gradient);
    p.leaky = options.leaky;
    set_squash(p, options.squash);
    p.eps = options.eps;
    add_logits_and_masks(p, logits, mask, out_mask);
    if (bias.has_value()) {
      expect("bias", *bias, {p.J, p.D});
      p.bias = view_of(*bias);
    }
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Problem& p, const Tensor& like,
                                                            bool return_coupling) {
    const ScalarType type = like.scalar_type(), wide = wide_type(like);
    const bool positions = p.positions >= 0;
    Tensor v = empty(like, {p.B, p.J, p.D}, type, p.positions);
    Tensor coupling = return_coupling ? empty(like, {p.B, p.I, p.J}, type, p.positions) : empty(like, {0}, type);
    // Neither is kept where there are positions.
    Tensor s = positions ? empty(like, {0}, wide) : empty(like, {p.iterations, p.B, p.J, p.D}, wide);
    Tensor norm =
        p.softmax_in() && !positions ? empty(like, {2, p.iterations, p.B, p.J}, wide) : empty(like, {0}, wide);
    ForwardOutputs out;
    out.batch = p.B;
    out.v = view_of(v, positions);
    if (return_coupling && coupling.numel() > 0) out.coupling = view_of(coupling, positions);
    out.s = s.data_ptr();
    out.norm = norm.data_ptr();
    if (wide == ScalarType::Double) {
      Engine::template forward<double>(p, out, like);
    } else {
      Engine::template forward<float>(p, out, like);
    }
    return {v, coupling, s, norm};
  }

  static void backward(const Problem& p, const Tensor& like, const Saved& saved, const BackwardOutputs& out) {
    const bool positions = p.positions >= 0;
    expect("dv", saved.dv, {p.B, p.J, p.D}, p.positions);
    if (!positions) expect("s", saved.s, {p.iterations, p.B, p.J, p.D});
    STD_TORCH_CHECK(saved.s.scalar_type() == wide_type(like), "capsfast: s must have the dtype sums are formed in");
    BackwardInputs in;
    in.batch = p.B;
    in.dv = view_of(saved.dv, positions);
    const Tensor s = torch::stable::contiguous(saved.s), norm = torch::stable::contiguous(saved.norm);
    in.s = s.data_ptr();
    if (p.softmax_in() && !positions) {
      expect("norm", saved.norm, {2, p.iterations, p.B, p.J});
      STD_TORCH_CHECK(
          saved.norm.scalar_type() == wide_type(like), "capsfast: norm must have the dtype sums are formed in");
      in.norm = norm.data_ptr();
    }
    if (saved.dcoupling.has_value()) {
      expect("dcoupling", *saved.dcoupling, {p.B, p.I, p.J}, p.positions);
      expect("coupling", saved.coupling, {p.B, p.I, p.J}, p.positions);
      in.dcoupling = view_of(*saved.dcoupling, positions);
      in.coupling = view_of(saved.coupling, positions);
    }
    if (wide_type(like) == ScalarType::Double) {
      Engine::template backward<double>(p, in, out, like);
    } else {
      Engine::template backward<float>(p, in, out, like);
    }
  }
};

}  // namespace bindings

// Registers the ops under the names of the schemas in schemas.h, each preceded by `prefix`.
template <class Engine, class Library>
void register_ops(Library& library, const std::string& prefix = "") {
  library.impl((prefix + "dynamic_routing").c_str(), TORCH_BOX(&bindings::Ops<Engine>::dynamic_routing));
  library.impl(
      (prefix + "dynamic_routing_backward").c_str(), TORCH_BOX(&bindings::Ops<Engine>::dynamic_routing_backward));
  library.impl((prefix + "route_votes").c_str(), TORCH_BOX(&bindings::Ops<Engine>::route_votes));
  library.impl((prefix + "route_votes_backward").c_str(), TORCH_BOX(&bindings::Ops<Engine>::route_votes_backward));
}

}  // namespace capsfast
