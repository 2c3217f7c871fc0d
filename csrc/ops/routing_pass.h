// The op routing_pass: tensors of the stable ABI in and out.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "pass_problem.h"

namespace capsfast {

struct PassArguments {
  Tensor u;                                 // [B, I, P K]; without a weight votes [B, I, J or 1, D] or [B, I, J, D, S]
  OptionalTensor weight;                    // [I or 1, J, R, K]
  OptionalTensor query, precision, center;  // [B, J, D]
  OptionalTensor prior;                     // [B, J]
  OptionalTensor logits;                    // [I, J] or [B, I, J]
  OptionalTensor activation, lse, mask;     // [B, I]
  OptionalTensor out_mask;                  // [B, J]
  std::optional<int64_t> J;
  std::string normalize;
  bool leaky = false, second = false, tf32 = false;

  void take_tensors(Stack& stack) {
    stack >> u >> weight >> query >> precision >> center >> prior >> logits >> activation >> lse >> mask >> out_mask;
  }
  void take_options(Stack& stack) { stack >> J >> normalize >> leaky >> second >> tf32; }
};

template <class Engine>
class RoutingPass : Arguments<Engine> {
  using Arguments<Engine>::add_logits_and_masks, Arguments<Engine>::problem_of, Arguments<Engine>::view;

 public:
  static void forward(Stack& stack) {
    PassArguments a;
    bool return_weights, return_lse;
    a.take_tensors(stack);
    a.take_options(stack);
    stack >> return_weights >> return_lse;
    Problem p = problem(a);
    const PassInputs in = inputs(p, a);
    const ScalarType type = a.u.scalar_type(), wide = wide_type(a.u);
    PassOutputs out;
    const auto output = [&](std::initializer_list<int64_t> sizes, bool wanted, ScalarType dtype, View* view) {
      Tensor tensor = wanted ? empty(a.u, sizes, dtype, p.positions) : empty(a.u, {0}, dtype);
      if (wanted && tensor.numel() > 0) *view = view_of(tensor, p.has_positions());
      return tensor;
    };
    Tensor mass = output({p.B, p.J}, true, wide, &out.mass);
    Tensor first = output({p.B, p.J, p.D}, true, wide, &out.first);
    Tensor second = output({p.B, p.J, p.D}, a.second, wide, &out.second);
    Tensor weights = output({p.B, p.I, p.J}, return_weights, p.softmax_in() ? wide : type, &out.weights);
    Tensor lse = output({p.B, p.softmax_in() ? p.J : p.I}, return_lse, wide, &out.lse);
    Tensor norm = p.softmax_in() ? empty(a.u, {2, p.samples(), p.J}, wide) : empty(a.u, {0}, wide);
    out.batch = p.samples();
    out.norm = norm.data_ptr();
    with_type(wide, [&](auto zero) { Engine::template pass_forward<decltype(zero)>(p, in, out, a.u); });
    stack.give({mass, first, second, weights, lse, norm});
  }

  static void backward(Stack& stack) {
    PassArguments a;
    OptionalTensor dmass, dfirst, dsecond, dweights, dlse_out;
    Tensor mass, first, second, weights, lse_out, norm;
    stack >> dmass >> dfirst >> dsecond >> dweights >> dlse_out;
    a.take_tensors(stack);
    stack >> mass >> first >> second >> weights >> lse_out >> norm;
    a.take_options(stack);
    const std::vector<bool> needed = stack.needed(9);
    // If the second moment has no gradient, the backward does not need it.
    a.second = a.second && dsecond.has_value();
    Problem p = problem(a);
    const PassInputs in = inputs(p, a);

    PassSaved saved;
    saved.batch = p.samples();
    saved.dmass = view("dmass", dmass, p, {p.B, p.J});
    saved.dfirst = view("dfirst", dfirst, p, {p.B, p.J, p.D});
    saved.dsecond = view("dsecond", dsecond, p, {p.B, p.J, p.D});
    saved.dweights = view("dweights", dweights, p, {p.B, p.I, p.J});
    saved.dlse = view("dlse_out", dlse_out, p, {p.B, p.softmax_in() ? p.J : p.I});
    saved.mass = view("mass", mass, p, {p.B, p.J});
    saved.first = view("first", first, p, {p.B, p.J, p.D});
    if (dsecond.has_value()) saved.second = view("second", second, p, {p.B, p.J, p.D});
    if (dweights.has_value()) saved.weights = view("weights", weights, p, {p.B, p.I, p.J});
    if (p.softmax_in()) saved.norm = Arguments<Engine>::saved("norm", norm, a.u, {2, p.samples(), p.J});

    PassGradients out;
    out.common.per_sample_logits = a.logits.has_value() && a.logits->dim() > 2;
    const auto gradients = gradients_of(a, p, needed, out.common);
    Tensor dquery = gradient_of(a.query, a.u, needed[2], p, &out.dquery);
    Tensor dprecision = gradient_of(a.precision, a.u, needed[3], p, &out.dprecision);
    Tensor dcenter = gradient_of(a.center, a.u, needed[4], p, &out.dcenter);
    Tensor dprior = gradient_of(a.prior, a.u, needed[5], p, &out.dprior);
    Tensor dlogits = gradient_of(a.logits, a.u, needed[6], p, &out.common.dlogits, out.common.per_sample_logits);
    Tensor dactivation = gradient_of(a.activation, a.u, needed[7], p, &out.dactivation);
    Tensor dlse = gradient_of(a.lse, a.u, needed[8], p, &out.dlse);
    with_type(
        wide_type(a.u), [&](auto zero) { Engine::template pass_backward<decltype(zero)>(p, in, saved, out, a.u); });
    stack.give({gradients.u, gradients.weight, dquery, dprecision, dcenter, dprior, dlogits, dactivation, dlse});
  }

 private:
  static Problem problem(const PassArguments& a) {
    Problem p = problem_of(a.u, a.weight, a.J);
    p.moments = true;
    p.normalize = choice_of<Normalize>("normalize", a.normalize, {"out", "in", "sigmoid", "none", "lse"});
    p.leaky = a.leaky;
    p.tf32 = a.tf32;
    p.quadratic = a.second || a.precision.has_value() || a.center.has_value();
    add_logits_and_masks(p, a.logits, a.mask, a.out_mask);
    p.activation = view("activation", a.activation, p, {p.B, p.I});
    p.lse = view("lse", a.lse, p, {p.B, p.I});
    STD_TORCH_CHECK(a.lse.has_value() == (p.normalize == Normalize::lse), "capsfast: lse goes with normalize 'lse'");
    return p;
  }

  static PassInputs inputs(const Problem& p, const PassArguments& a) {
    return {view("query", a.query, p, {p.B, p.J, p.D}), view("precision", a.precision, p, {p.B, p.J, p.D}),
            view("center", a.center, p, {p.B, p.J, p.D}), view("prior", a.prior, p, {p.B, p.J})};
  }
};

template <class Engine, class Library>
void register_routing_pass(Library& library, const std::string& prefix = "") {
  using Op = RoutingPass<Engine>;
  library.impl((prefix + "routing_pass").c_str(), &boxed<Op::forward>);
  library.impl((prefix + "routing_pass_backward").c_str(), &boxed<Op::backward>);
}

}  // namespace capsfast
