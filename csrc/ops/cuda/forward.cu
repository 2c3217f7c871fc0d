// The forward: a reducing pass an iteration, and between them s, v and V.
#include "call.h"
#include "steps.h"

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
  steps.V = call.template scratch<T>(call.vectors());
  steps.s = {static_cast<T*>(out.s), p.iterations * call.vectors()};
  if (p.softmax_in) steps.norm = {static_cast<T*>(out.norm), 2 * p.iterations * call.scalars()};
  steps.parts = call.parts(p.softmax_in);
  return steps;
}

}  // namespace

template <class T>
void forward(const Problem& p, const ForwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0) return;
  Call<T> call(p, like);
  const ForwardSteps<T> steps = steps_of(call, p, out);
  const int64_t rows = call.plan.rows_apart ? p.B * p.I : 0;
  const Global<T> row_max = call.template scratch<T>(rows), row_scale = call.template scratch<T>(rows);
  for (int64_t t = 0; t < p.iterations; ++t) {
    ReduceArgs<T> pass = steps.pass(t);
    if (call.plan.rows_apart && !pass.unweighted) {
      call.rows({pass.in, pass.scoring, row_max, row_scale, {}});
      pass.norm = {row_max, row_scale, {}};
    }
    call.reduce(pass, steps.parts);
    call.per_output(output_kernel<T>, steps.output(t));
  }
  if (steps.coupling_apart()) call.reduce(steps.coupling_pass());
}

template void forward<float>(const Problem&, const ForwardOutputs&, const Tensor&);
template void forward<double>(const Problem&, const ForwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
