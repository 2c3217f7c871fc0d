// The ops dynamic_routing and factored_routing: tensors of the stable ABI in and out.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "problem.h"

namespace capsfast {

struct RoutingArguments {
  Tensor u;                 // [B, I, P K]; without a weight votes [B, I, J or 1, D] or [B, I, J, D, S]
  OptionalTensor weight;    // [I or 1, J, R, K]
  OptionalTensor logits;    // [I, J] or [B, I, J]
  OptionalTensor bias;      // [J, D]
  OptionalTensor mask;      // [B, I]
  OptionalTensor out_mask;  // [B, J]
  std::optional<int64_t> J;
  int64_t num_iterations = 1;
  std::string softmax, gradient, squash, last_squash;
  bool leaky = false, accumulate = true, wide = false, tf32 = false;
  double eps = 0, sharpness = 1;

  void take_tensors(Stack& stack) { stack >> u >> weight >> logits >> bias >> mask >> out_mask; }
  void take_options(Stack& stack) {
    stack >> J >> num_iterations >> softmax >> gradient >> leaky;
    stack >> squash >> last_squash >> eps >> sharpness >> accumulate >> wide >> tf32;
  }
};

template <class Engine>
class DynamicRouting : Arguments<Engine> {
  using Arguments<Engine>::add_logits_and_masks, Arguments<Engine>::expect, Arguments<Engine>::problem_of;
  using Arguments<Engine>::saved, Arguments<Engine>::upstream, Arguments<Engine>::view;

 public:
  static void forward(Stack& stack) {
    RoutingArguments a;
    bool return_coupling;
    a.take_tensors(stack);
    a.take_options(stack);
    stack >> return_coupling;
    const Problem p = problem(a);
    const ScalarType type = a.u.scalar_type(), wide = wide_type(a.u), of_coupling = p.softmax_in() ? wide : type;
    const bool positions = p.has_positions();
    Tensor v = empty(a.u, {p.B, p.J, p.D}, a.wide ? wide : type, p.positions);
    Tensor coupling =
        return_coupling ? empty(a.u, {p.B, p.I, p.J}, of_coupling, p.positions) : empty(a.u, {0}, of_coupling);
    // With positions neither s nor norm is kept.
    Tensor s = positions ? empty(a.u, {0}, wide) : empty(a.u, {p.iterations, p.B, p.J, kept_size(p)}, wide);
    Tensor norm = keeps_norm(p) ? empty(a.u, {2, p.iterations, p.B, p.J}, wide) : empty(a.u, {0}, wide);
    ForwardOutputs out;
    out.batch = p.B;
    out.v = view_of(v, positions);
    if (return_coupling && coupling.numel() > 0) out.coupling = view_of(coupling, positions);
    out.s = s.data_ptr();
    out.norm = norm.data_ptr();
    with_type(wide, [&](auto zero) { Engine::template forward<decltype(zero)>(p, out, a.u); });
    stack.give({v, coupling, s, norm});
  }

  static void backward(Stack& stack) {
    RoutingArguments a;
    OptionalTensor dv, dcoupling;  // [B, J, D] and [B, I, J]
    Tensor coupling, s, norm;      // [B, I, J], [r, B, J, D] and [2, r, B, J], each empty if it was not kept
    stack >> dv >> dcoupling;
    a.take_tensors(stack);
    stack >> coupling >> s >> norm;
    a.take_options(stack);
    const std::vector<bool> needed = stack.needed(4);
    const Problem p = problem(a);
    const bool positions = p.has_positions();

    BackwardInputs in;
    in.batch = p.B;
    in.dv = upstream(dv, a.u, p);
    if (!positions) in.s = saved("s", s, a.u, {p.iterations, p.B, p.J, kept_size(p)});
    if (keeps_norm(p)) in.norm = saved("norm", norm, a.u, {2, p.iterations, p.B, p.J});
    in.dcoupling = view("dcoupling", dcoupling, p, {p.B, p.I, p.J});
    if (dcoupling.has_value()) in.coupling = view("coupling", coupling, p, {p.B, p.I, p.J});

    BackwardOutputs out;
    out.per_sample_logits = a.logits.has_value() && a.logits->dim() > 2;
    const auto gradients = gradients_of(a, p, needed, out);
    Tensor dlogits = gradient_of(a.logits, a.u, needed[2], p, &out.dlogits, out.per_sample_logits);
    Tensor dbias = gradient_of(a.bias, a.u, needed[3], p, &out.dbias, false);
    with_type(wide_type(a.u), [&](auto zero) { Engine::template backward<decltype(zero)>(p, in, out, a.u); });
    stack.give({gradients.u, gradients.weight, dlogits, dbias});
  }

 private:
  // The last axis of s: a factored routing keeps sums of poses instead of sums of votes.
  static int64_t kept_size(const Problem& p) { return Engine::kFactored ? p.K : p.D; }
  static bool keeps_norm(const Problem& p) { return p.softmax_in() && !p.has_positions() && !Engine::kFactored; }

  static Squash squash_of(const char* name, const std::string& kind) {
    return choice_of<Squash>(name, kind, {"paper", "half", "eps_outside", "exp", "unit", "identity"});
  }

  static Problem problem(const RoutingArguments& a) {
    Problem p = problem_of(a.u, a.weight, a.J);
    if (Engine::kFactored) {
      STD_TORCH_CHECK(p.shared_weight, "capsfast: weight must be [1, J or 1, D, K]");
      STD_TORCH_CHECK(p.B == 0 || !p.empty(), "capsfast: only the batch may be empty");
    } else {
      STD_TORCH_CHECK(p.votes_given || !p.shared_outputs, "capsfast: J must equal the J of weight");
    }
    STD_TORCH_CHECK(a.num_iterations >= 1, "capsfast: num_iterations must be at least 1");
    // The gradient kernels have one b = logits + votes . V for all iterations.
    STD_TORCH_CHECK(a.accumulate || !a.logits.has_value() || Engine::kFactored, "capsfast: logits must accumulate");
    p.iterations = a.num_iterations;
    p.normalize = choice_of<Normalize>("softmax", a.softmax, {"out", "in"});
    p.gradient_last = choice_of<bool>("gradient", a.gradient, {"full", "last"});
    p.leaky = a.leaky;
    p.squash.kind = squash_of("squash", a.squash);
    p.squash.last = squash_of("last_squash", a.last_squash);
    p.squash.eps = a.eps;
    p.squash.sharpness = a.sharpness;
    p.squash.accumulate = a.accumulate;
    p.tf32 = a.tf32;
    add_logits_and_masks(p, a.logits, a.mask, a.out_mask);
    if (a.bias.has_value()) {
      expect("bias", *a.bias, {p.J, p.D});
      p.bias = view_of(*a.bias);
    }
    return p;
  }
};

template <class Engine, class Library>
void register_dynamic_routing(Library& library, const std::string& name = "dynamic_routing") {
  using Op = DynamicRouting<Engine>;
  library.impl(name.c_str(), &boxed<Op::forward>);
  library.impl((name + "_backward").c_str(), &boxed<Op::backward>);
}

}  // namespace capsfast
