// The backward: an accumulating pass for each iteration from the last to the second, then one gradient pass for all
// iterations.
#include "engine.h"
#include "launch.h"

namespace capsfast::cuda {

namespace {

template <class T>
BackwardSteps<T> steps_of(Call<T>& call, const BackwardInputs& inputs) {
  const Problem& p = call.p;
  BackwardSteps<T> steps{};
  steps.in = call.in;
  steps.squash = call.squash;
  steps.first = p.gradient_last ? p.iterations - 1 : 0;
  steps.iterations = p.iterations;
  steps.dv = operand(inputs.dv, {p.B, p.J, p.D});
  steps.coupling = operand(inputs.coupling, {p.B, p.I, p.J});
  steps.dcoupling = operand(inputs.dcoupling, {p.B, p.I, p.J});
  steps.s = {static_cast<const T*>(inputs.s), p.iterations * call.vectors()};
  steps.order = call.order();
  steps.V = call.vector_scratch(p.iterations);
  steps.ds = call.vector_scratch(p.iterations);
  steps.G = call.template scratch<T>(call.vectors());
  if (p.softmax_in()) {
    const int64_t count = p.iterations * call.scalars();
    const Global<const T> norm(static_cast<const T*>(inputs.norm), 2 * count);
    steps.mean = call.template scratch<T>(count);
    steps.columns = {norm.from(0, count), norm.from(count, count), steps.mean};
  }
  steps.parts = call.parts(false, steps.passes() > 0);
  return steps;
}

// The arguments that are the same for the gradient kernels of all families.
template <class Args, class T>
Args described(Args args, const BackwardSteps<T>& steps, bool gradient_last) {
  args.in = steps.in;
  args.first = static_cast<decltype(args.first)>(steps.first);
  args.iterations = static_cast<decltype(args.first)>(steps.iterations);
  args.gradient_last = gradient_last;
  args.V = steps.V;
  args.ds = steps.ds;
  args.dcoupling = steps.dcoupling;
  args.norm = steps.columns;  // absent for the softmax over the output capsules
  return args;
}

void gradient_by_rows(Call<float>& call, const BackwardSteps<float>& steps, const BackwardOutputs& out) {
  const rows::GradientPlan plan = call.by_rows->plan_gradient(out.dlogits.data != nullptr && !out.per_sample_logits);
  rows::GradientArgs args = described(rows::GradientArgs{}, steps, call.p.gradient_last);
  gradient_pass(call, out, args, plan.parts, plan.splits,
                [&](const rows::GradientArgs& with) { call.by_rows->gradient(with, plan); });
}

}  // namespace

template <class T>
void Engine::backward(const Problem& p, const BackwardInputs& inputs, const BackwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0) return;
  const bool logits = out.dlogits.data != nullptr;
  Call<T> call(p, like, {true, inputs.dcoupling.data != nullptr || logits});
  const BackwardSteps<T> steps = steps_of(call, inputs);
  const int64_t terms = p.iterations - steps.first, size = steps.order.size(p.B);
  const GeneralPlan& plan = call.plan;
  const auto row_norms = call.row_norm_scratch(plan.row_norm_apart || plan.gradient_row_norm_apart ? p.iterations : 0);
  call.run(steps, [&](int64_t n) {
    const int64_t t = steps.iteration_of(n);
    return call.row_norm(call.in, steps.scoring(t), row_norms, t);
  });
  if (out.dbias.data != nullptr)
    call.sum_vectors(steps.ds.from(steps.first * size, terms * size), terms, p.B, steps.order, out.dbias);
  if (!wants_gradient(p, out)) return;
  if constexpr (std::is_same_v<T, float>) {
    if (call.by_rows) return gradient_by_rows(call, steps, out);
  }
  GradientArgs<T> args = described(gradient_args<T>(p, out), steps, p.gradient_last);
  args.scored = 1;
  if (plan.gradient_row_norm_apart) {
    for (int64_t t = steps.first; t < p.iterations; ++t) {
      Scoring<T> with = steps.scoring(t);
      // Without a gradient through the agreement the sum of c dc is not needed.
      if (!logits && (t == 0 || p.gradient_last)) with.ds = {};
      // If the accumulating passes had a sweep too, its normalisers are still there.
      if (!plan.row_norm_apart || t == steps.first) call.row_norm(call.in, with, row_norms, t);
    }
    args.norm = row_norms.all();
  }
  general_gradient(call, out, args);
}

template void Engine::backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);
template void Engine::backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
