// A call of the rows family: its kernels and how they are launched.
#pragma once

#include "plan.h"

namespace capsfast::cuda::rows {

class Launcher {
 public:
  Launcher(const Problem& problem, const Inputs& inputs, bool backward, bool with_coupling, const gpu::Context& context)
      : p(problem),
        in(inputs),
        on(context),
        choice(choose(problem, with_coupling)),
        kernels(kernels_for(choice)),
        plan(backward ? plan_accumulate<true>(problem, inputs, kernels, context)
                      : plan_accumulate<false>(problem, inputs, kernels, context)) {}

  VectorOrder order() const { return {p.J, p.D, choice.tiles}; }
  const Work& work() const { return plan.work; }
  bool together() const { return plan.together && on.cooperative(); }

  // Runs passes [begin, end) of `steps`; see AccumulateArgs. False if `together` and the device refuses it. Nothing was
  // launched then.
  template <bool kBackward, class Steps>
  bool accumulate(const Steps& steps, int64_t begin, int64_t end, bool together) const {
    const AccumulateArgs<kBackward> args{
        steps, plan.work, plan.shape, pieces_of(p), together, static_cast<int>(begin), static_cast<int>(end), 0};
    const auto launch = [&](auto kernel) {
      return gpu::try_launch(kernel, {plan.work.units * plan.cluster, 1, 1}, plan.shape.threads(),
                             kernels.accumulate_bytes(in, plan.shape), on.stream(), args, {plan.cluster, together});
    };
    if constexpr (kBackward) {
      return launch(kernels.backward);
    } else {
      return launch(kernels.forward);
    }
  }

  GradientPlan plan_gradient(bool with_dlogits) const { return rows::plan_gradient(p, in, kernels, with_dlogits, on); }

  void gradient(GradientArgs args, const GradientPlan& by) const {
    args.shape = by.shape;
    args.in_pieces = pieces_of(p);
    gpu::launch(
        kernels.gradient, {by.parts * by.cluster, by.splits, 1}, by.shape.threads(),
        kernels.gradient_bytes(in, by.shape, static_cast<bool>(args.dlogits)), on.stream(), args, {by.cluster, false});
  }

 private:
  const Problem& p;
  const Inputs& in;
  const gpu::Context& on;
  const Choice choice;
  const Kernels kernels;
  const AccumulatePlan plan;
};

}  // namespace capsfast::cuda::rows
