// The backward: an accumulating pass for each iteration from the last to the second, then one gradient pass for all
// iterations.
#include "columns/routing.h"
#include "engine.h"
#include "launch.h"

namespace capsfast::cuda {

template <class T>
void Engine::backward(const Problem& p, const BackwardInputs& inputs, const BackwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0) return;
  const bool logits = out.dlogits.data != nullptr, wanted = wants_gradient(p, out);
  const gpu::Context context(like);
  Family family = Family::general;
  if constexpr (std::is_same_v<T, float>) {
    family = family_of(p, context, inputs.dcoupling.data != nullptr || logits);
    if (family == Family::columns && columns::backward(p, inputs, out, context)) return;
  }
  Call<T> call(p, context, true, family);
  const GeneralPlan& plan = call.plan;
  typename Call<T>::Gradient gradient{};
  if (wanted) gradient = call.plan_gradient(out);
  BackwardSteps<T> steps{};
  steps.in = call.in;
  steps.squash = call.squash;
  steps.start = p.gradient_last ? p.iterations - 1 : 0;
  steps.iterations = p.iterations;
  steps.dv = operand(inputs.dv, {p.B, p.J, p.D});
  steps.coupling = operand(inputs.coupling, {p.B, p.I, p.J});
  steps.dcoupling = operand(inputs.dcoupling, {p.B, p.I, p.J});
  steps.s = {static_cast<const T*>(inputs.s), p.iterations * call.vectors()};
  steps.order = call.order();
  call.with([&] {
    steps.V = call.take_vectors(p.iterations);
    steps.ds = call.take_vectors(p.iterations);
    steps.G = call.template take<T>(call.vectors());
    if (p.softmax_in()) steps.mean = call.template take<T>(p.iterations * call.scalars());
    steps.parts = call.take_parts(false, steps.passes() > 0);
    if (plan.row_norm_apart) call.take_row_norms(p.iterations);
    call.take_sums(&gradient);
  });
  if (p.softmax_in()) {
    const int64_t count = p.iterations * call.scalars();
    const Global<const T> norm(static_cast<const T*>(inputs.norm), 2 * count);
    steps.columns = {norm.from(0, count), norm.from(count, count), steps.mean};
  }
  call.run(steps);
  if (out.dbias.data != nullptr) {
    constexpr int kLanes = 8;
    const int64_t terms = p.iterations - steps.start, size = steps.order.size(p.B);
    const Global<const T> ds = steps.ds.from(steps.start * size, terms * size);
    call.join(JoinArgs<T>{terms * p.B, p.J * p.D, ds, {}, kLanes, p.B, steps.order}, out.dbias);
  }
  if (!wanted) return;
  GradientArgs<T>& args = gradient.args;
  args.start = steps.start;
  args.scored = 1;
  args.V = steps.V;
  args.ds = steps.ds;
  args.dcoupling = steps.dcoupling;
  args.norm = steps.columns;  // absent for the softmax over the output capsules
  if (plan.row_norm_apart) {
    // The accumulating passes have left the normalisers of the later iterations.
    Scoring<T> with = steps.scoring(steps.start);
    // Without a gradient through the agreement the sum of c dc is not needed.
    if (!logits && (steps.start == 0 || p.gradient_last)) with.ds = {};
    call.row_norm(with, steps.start);
    args.norm = call.row_norms();
  }
  call.run(gradient, out);
}

template void Engine::backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);
template void Engine::backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
