// The op factored_routing: tensors of the stable ABI in and out. It runs on the CPU alone.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "cpu/engine.h"
#include "cpu/factored.h"
#include "dynamic_routing.h"

namespace capsfast {

class FactoredRouting : Arguments<CpuEngine> {
 public:
  static void forward(Stack& stack) {
    RoutingArguments call;
    bool return_coupling;
    call.take_tensors(stack);
    const Problem p = problem(stack, call);
    stack >> return_coupling;
    const ScalarType type = call.u.scalar_type(), wide = wide_type(call.u);
    Tensor v = empty(call.u, {p.B, p.J, p.D}, type),
           coupling = return_coupling ? empty(call.u, {p.B, p.I, p.J}, type) : empty(call.u, {0}, type),
           z = empty(call.u, {p.B, p.iterations, p.J, p.K}, wide);
    if (p.empty()) {
      // All sums are empty; only the squashed bias is left.
      torch::stable::zero_(z);
      torch::stable::zero_(v);
      torch::stable::zero_(coupling);
    } else {
      ForwardOutputs out;
      out.v = view_of(v), out.s = z.data_ptr();
      if (return_coupling) out.coupling = view_of(coupling);
      with_team(
          worth_sharing(p), [&] { with_type(wide, [&](auto zero) { factored_forward<decltype(zero)>(p, out); }); });
    }
    stack.give({v, coupling, z});
  }

  static void backward(Stack& stack) {
    RoutingArguments call;
    OptionalTensor dv, dcoupling;  // [B, J, D] and [B, I, J]
    Tensor z;                      // [B, r, J, K]
    stack >> dv >> dcoupling;
    call.take_tensors(stack);
    stack >> z;
    const Problem p = problem(stack, call);
    const std::vector<bool> needed = stack.needed(4);
    BackwardInputs in;
    in.dv = upstream(dv, call.u, p);
    in.s = saved("z", z, call.u, {p.B, p.iterations, p.J, p.K});
    in.dcoupling = view("dcoupling", dcoupling, p, {p.B, p.I, p.J});
    BackwardOutputs out;
    out.per_sample_logits = call.logits.has_value() && call.logits->dim() > 2;
    const auto gradients = gradients_of(call, p, needed, out);
    Tensor dlogits = gradient_like(
               call.logits.value_or(call.u), needed[2] && call.logits.has_value(), p.empty(), &out.dlogits),
           dbias = gradient_like(call.bias.value_or(call.u), needed[3] && call.bias.has_value(), p.empty(), &out.dbias);
    if (!p.empty()) {
      with_team(worth_sharing(p), [&] {
        with_type(wide_type(call.u), [&](auto zero) { factored_backward<decltype(zero)>(p, in, out); });
      });
    }
    stack.give({gradients.u, gradients.weight, dlogits, dbias});
  }

 private:
  // Takes the options.
  static Problem problem(Stack& stack, RoutingArguments& a) {
    a.take_options(stack);
    STD_TORCH_CHECK(a.weight.has_value() && a.weight->dim() == 4 && a.weight->size(0) == 1,
                    "capsfast: weight must be [1, J or 1, D, K]");
    Problem p = DynamicRouting<CpuEngine>::problem(a);
    STD_TORCH_CHECK(p.P == 1, "capsfast: factored_routing takes poses that are vectors");
    stack >> p.accumulate;
    return p;
  }

  static bool worth_sharing(const Problem& p) {
    return double(p.B) * double(p.I) * double(p.J) * double(p.K) * double(p.iterations) >= CpuEngine::kShared;
  }
};

template <class Library>
void register_factored_routing(Library& library) {
  library.impl("factored_routing", &boxed<FactoredRouting::forward>);
  library.impl("factored_routing_backward", &boxed<FactoredRouting::backward>);
}

}  // namespace capsfast
