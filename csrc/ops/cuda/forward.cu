// The forward: each iteration is an accumulating pass, after which s, v and V are computed from its sums.
#include "engine.h"
#include "launch.h"
#include "steps.h"
#include "votes/launch.h"

namespace capsfast::cuda {

namespace {

template <class T>
ForwardSteps<T> steps_of(Call<T>& call, const Problem& p, const ForwardOutputs& out) {
  ForwardSteps<T> steps{};
  steps.in = call.in;
  steps.squash = call.squash;
  steps.iterations = p.iterations;
  steps.coupling = operand(out.coupling, {p.B, p.I, p.J});
  steps.v = operand(out.v, {p.B, p.J, p.D});
  steps.order = call.order();
  steps.V = call.vector_scratch(1);
  steps.s = {static_cast<T*>(out.s), p.iterations * call.vectors()};
  if (p.softmax_in()) steps.norm = {static_cast<T*>(out.norm), 2 * p.iterations * call.scalars()};
  steps.parts = call.parts(p.softmax_in());
  return steps;
}

}  // namespace

template <class T>
void forward(const Problem& p, const ForwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0 || votes_forward(p, out, like)) return;
  Call<T> call(p, like, false, out.coupling.data != nullptr);
  const ForwardSteps<T> steps = steps_of(call, p, out);
  if (call.template run_together<false>(steps)) return;
  const int64_t rows = call.plan.row_norm_apart ? p.B * p.I : 0;
  const Global<T> row_max = call.template scratch<T>(rows), row_scale = call.template scratch<T>(rows);
  const Normaliser<T> row_norm{row_max, row_scale, {}};
  for (int64_t n = 0; n < steps.passes(); ++n) {
    const AccumulateArgs<T> pass = steps.pass(n);
    const bool apart = call.plan.row_norm_apart && !pass.unweighted;
    if (apart) call.row_norm({pass.in, pass.scoring, row_max, row_scale, {}});
    call.template accumulate<false>(steps, n, apart ? &row_norm : nullptr);
    if (n < p.iterations) call.per_output(output_kernel<T>, steps.output(n));
  }
}

template void forward<float>(const Problem&, const ForwardOutputs&, const Tensor&);
template void forward<double>(const Problem&, const ForwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
