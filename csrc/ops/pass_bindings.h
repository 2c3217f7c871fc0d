// The pass ops: stable-ABI tensors in, tensors out. An Engine that serves them has `pass_forward<T>` and
// `pass_backward<T>` beside what bindings.h asks for.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>

#include "arguments.h"
#include "options.h"
#include "pass.h"

namespace capsfast {
namespace bindings {

// What the ops get beside u and weight or votes, in the order of the schemas.
struct PassArguments {
  const OptionalTensor &query, &precision, &center;  // [B, J, D]
  const OptionalTensor& prior;                       // [B, J]
  const OptionalTensor& logits;                      // [I, J] or [B, I, J]
  const OptionalTensor &activation, &lse, &mask;     // [B, I]
  const OptionalTensor& out_mask;                    // [B, J]
};

// The gradients of the outputs, and the outputs.
struct PassResults {
  const OptionalTensor &dmass, &dfirst, &dsecond, &dweights, &dlse;
  const Tensor &mass, &first, &second, &weights, &norm;
};

// For which of the parameters gradients are needed.
struct PassNeeds {
  bool query, precision, center, prior, logits, activation, lse;
};

template <class Engine>
class PassOps : Arguments<Engine> {
  using Arguments<Engine>::add_logits_and_masks, Arguments<Engine>::expect, Arguments<Engine>::problem_of;
  using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  using Optional = OptionalTensor;

 public:
  static Outputs routing_pass(Tensor u, Tensor weight, Optional query, Optional precision, Optional center,
                              Optional prior, Optional logits, Optional activation, Optional lse, Optional mask,
                              Optional out_mask, std::string normalize, bool leaky, bool second, bool tf32,
                              bool return_weights, bool return_lse) {
    Problem p = problem_of(u, weight);
    p.tf32 = tf32;
    const PassArguments given{query, precision, center, prior, logits, activation, lse, mask, out_mask};
    return forward(p, u, given, normalize, leaky, second, return_weights, return_lse);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> routing_pass_backward(
      Optional dmass, Optional dfirst, Optional dsecond, Optional dweights, Optional dlse_out, Tensor u, Tensor weight,
      Optional query, Optional precision, Optional center, Optional prior, Optional logits, Optional activation,
      Optional lse, Optional mask, Optional out_mask, Tensor mass, Tensor first, Tensor second_moment, Tensor weights,
      Tensor lse_out, Tensor norm, std::string normalize, bool leaky, bool second, bool tf32, bool need_u,
      bool need_weight, bool need_query, bool need_precision, bool need_center, bool need_prior, bool need_logits,
      bool need_activation, bool need_lse) {
    Problem p = problem_of(u, weight);
    p.tf32 = tf32;
    const PassArguments given{query, precision, center, prior, logits, activation, lse, mask, out_mask};
    PassGradients out;
    Tensor du = gradient_like(u, need_u, p.empty(), &out.common.du);
    Tensor dweight = gradient_like(weight, need_weight, p.empty(), &out.common.dweight);
    out.common.weight_rows = weight.size(0);
    auto [dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse] =
        backward(p, u, given, normalize, leaky, second,
                 {dmass, dfirst, dsecond, dweights, dlse_out, mass, first, second_moment, weights, norm},
                 {need_query, need_precision, need_center, need_prior, need_logits, need_activation, need_lse}, out);
    return {du, dweight, dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse};
  }

  static Outputs votes_pass(Tensor votes, Optional query, Optional precision, Optional center, Optional prior,
                            Optional logits, Optional activation, Optional lse, Optional mask, Optional out_mask,
                            int64_t J, std::string normalize, bool leaky, bool second, bool return_weights,
                            bool return_lse) {
    Problem p = problem_of(votes, J);
    const PassArguments given{query, precision, center, prior, logits, activation, lse, mask, out_mask};
    return forward(p, votes, given, normalize, leaky, second, return_weights, return_lse);
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> votes_pass_backward(
      Optional dmass, Optional dfirst, Optional dsecond, Optional dweights, Optional dlse_out, Tensor votes,
      Optional query, Optional precision, Optional center, Optional prior, Optional logits, Optional activation,
      Optional lse, Optional mask, Optional out_mask, Tensor mass, Tensor first, Tensor second_moment, Tensor weights,
      Tensor lse_out, Tensor norm, int64_t J, std::string normalize, bool leaky, bool second, bool need_votes,
      bool need_query, bool need_precision, bool need_center, bool need_prior, bool need_logits, bool need_activation,
      bool need_lse) {
    Problem p = problem_of(votes, J);
    const PassArguments given{query, precision, center, prior, logits, activation, lse, mask, out_mask};
    PassGradients out;
    Tensor dvotes = gradient_like(votes, need_votes, p.empty(), &out.common.dweight, p.positions >= 0, false);
    auto [dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse] =
        backward(p, votes, given, normalize, leaky, second,
                 {dmass, dfirst, dsecond, dweights, dlse_out, mass, first, second_moment, weights, norm},
                 {need_query, need_precision, need_center, need_prior, need_logits, need_activation, need_lse}, out);
    return {dvotes, dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse};
  }

 private:
  static View matrix(const char* name, const OptionalTensor& tensor, const Problem& p,
                     std::initializer_list<int64_t> sizes) {
    if (!tensor.has_value()) return {};
    expect(name, *tensor, sizes, p.positions);
    return view_of(*tensor, p.positions >= 0);
  }

  // Fills in the rest of the problem, whose sizes are set.
  static PassInputs fill(Problem& p, const PassArguments& given, const std::string& normalize, bool leaky,
                         bool second) {
    p.moments = true;
    p.normalize = normalize_of(normalize);
    p.leaky = leaky;
    p.quadratic = second || given.precision.has_value() || given.center.has_value();
    add_logits_and_masks(p, given.logits, given.mask, given.out_mask);
    p.activation = matrix("activation", given.activation, p, {p.B, p.I});
    p.lse = matrix("lse", given.lse, p, {p.B, p.I});
    STD_TORCH_CHECK(
        given.lse.has_value() == (p.normalize == Normalize::lse), "capsfast: lse goes with normalize 'lse'");
    return {matrix("query", given.query, p, {p.B, p.J, p.D}), matrix("precision", given.precision, p, {p.B, p.J, p.D}),
            matrix("center", given.center, p, {p.B, p.J, p.D}), matrix("prior", given.prior, p, {p.B, p.J})};
  }

  static Outputs forward(Problem& p, const Tensor& like, const PassArguments& given, const std::string& normalize,
                         bool leaky, bool second, bool return_weights, bool return_lse) {
    const PassInputs in = fill(p, given, normalize, leaky, second);
    const ScalarType type = like.scalar_type(), wide = wide_type(like);
    PassOutputs out;
    const auto output = [&](std::initializer_list<int64_t> sizes, bool wanted, ScalarType dtype, View* view) {
      Tensor tensor = wanted ? empty(like, sizes, dtype, p.positions) : empty(like, {0}, dtype);
      if (wanted && tensor.numel() > 0) *view = view_of(tensor, p.positions >= 0);
      return tensor;
    };
    Tensor mass = output({p.B, p.J}, true, wide, &out.mass);
    Tensor first = output({p.B, p.J, p.D}, true, wide, &out.first);
    Tensor moment = output({p.B, p.J, p.D}, second, wide, &out.second);
    Tensor weights = output({p.B, p.I, p.J}, return_weights, type, &out.weights);
    Tensor lse = output({p.B, p.softmax_in() ? p.J : p.I}, return_lse, wide, &out.lse);
    Tensor norm = p.softmax_in() ? empty(like, {2, p.samples(), p.J}, wide) : empty(like, {0}, wide);
    out.batch = p.samples();
    out.norm = norm.data_ptr();
    if (wide == ScalarType::Double) {
      Engine::template pass_forward<double>(p, in, out, like);
    } else {
      Engine::template pass_forward<float>(p, in, out, like);
    }
    return {mass, first, moment, weights, lse, norm};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> backward(
      Problem& p, const Tensor& like, const PassArguments& given, const std::string& normalize, bool leaky, bool second,
      const PassResults& results, const PassNeeds& need, PassGradients& out) {
    // Without a gradient of the second moment, and without squares in the score, it plays no part.
    const PassInputs in = fill(p, given, normalize, leaky, second && results.dsecond.has_value());
    PassSaved saved;
    saved.batch = p.samples();
    saved.dmass = matrix("dmass", results.dmass, p, {p.B, p.J});
    saved.dfirst = matrix("dfirst", results.dfirst, p, {p.B, p.J, p.D});
    saved.dsecond = matrix("dsecond", results.dsecond, p, {p.B, p.J, p.D});
    saved.dweights = matrix("dweights", results.dweights, p, {p.B, p.I, p.J});
    saved.dlse = matrix("dlse_out", results.dlse, p, {p.B, p.softmax_in() ? p.J : p.I});
    const ScalarType wide = wide_type(like);
    const auto moment = [&](const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
      expect(name, tensor, sizes, p.positions);
      return view_of(tensor, p.positions >= 0);
    };
    saved.mass = moment("mass", results.mass, {p.B, p.J});
    saved.first = moment("first", results.first, {p.B, p.J, p.D});
    if (results.dsecond.has_value()) saved.second = moment("second", results.second, {p.B, p.J, p.D});
    if (results.dweights.has_value()) saved.weights = moment("weights", results.weights, {p.B, p.I, p.J});
    const Tensor norm = torch::stable::contiguous(results.norm);
    if (p.softmax_in()) {
      expect("norm", norm, {2, p.samples(), p.J});
      STD_TORCH_CHECK(norm.scalar_type() == wide, "capsfast: norm must have the dtype sums are formed in");
      saved.norm = norm.data_ptr();
    }
    out.common.per_sample_logits = given.logits.has_value() && given.logits->dim() > 2;
    const auto gradient = [&](const OptionalTensor& tensor, bool wanted, View* view, bool per_sample = true) {
      const bool positions = per_sample && p.positions >= 0;
      return gradient_like(tensor.value_or(like), wanted && tensor.has_value(), p.empty(), view, positions);
    };
    Tensor dquery = gradient(given.query, need.query, &out.dquery);
    Tensor dprecision = gradient(given.precision, need.precision, &out.dprecision);
    Tensor dcenter = gradient(given.center, need.center, &out.dcenter);
    Tensor dprior = gradient(given.prior, need.prior, &out.dprior);
    Tensor dlogits = gradient(given.logits, need.logits, &out.common.dlogits, out.common.per_sample_logits);
    Tensor dactivation = gradient(given.activation, need.activation, &out.dactivation);
    Tensor dlse = gradient(given.lse, need.lse, &out.dlse);
    if (wide == ScalarType::Double) {
      Engine::template pass_backward<double>(p, in, saved, out, like);
    } else {
      Engine::template pass_backward<float>(p, in, saved, out, like);
    }
    return {dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse};
  }
};

}  // namespace bindings

// Registers the ops under the names of the schemas in capsfast/ops/_register.py, each preceded by `prefix`.
template <class Engine, class Library>
void register_pass_ops(Library& library, const std::string& prefix = "") {
  library.impl((prefix + "routing_pass").c_str(), TORCH_BOX(&bindings::PassOps<Engine>::routing_pass));
  library.impl(
      (prefix + "routing_pass_backward").c_str(), TORCH_BOX(&bindings::PassOps<Engine>::routing_pass_backward));
  library.impl((prefix + "votes_pass").c_str(), TORCH_BOX(&bindings::PassOps<Engine>::votes_pass));
  library.impl((prefix + "votes_pass_backward").c_str(), TORCH_BOX(&bindings::PassOps<Engine>::votes_pass_backward));
}

}  // namespace capsfast
