// A linear pass is one iteration of routing without a squash, with the query as V. It runs the general accumulating
// pass, whose sums are the moments. In the backward its sums are dquery and dprior; the gradient pass computes the
// rest.
#include <torch/headeronly/util/Exception.h>

#include "engine.h"
#include "launch.h"
#include "pass_steps.h"

namespace capsfast::cuda {

namespace {

void check(const Problem& p) {
  const char* lacking = nullptr;
  if (p.normalize != Normalize::out && p.normalize != Normalize::in) lacking = "normalize 'sigmoid', 'none' or 'lse'";
  if (p.activation.data != nullptr) lacking = "an activation";
  if (p.quadratic) lacking = "precision, center or second moments";
  STD_TORCH_CHECK(lacking == nullptr, "capsfast: the CUDA kernels of a pass do not serve ", lacking);
}

// Adds to `steps` what forward and backward share.
template <class T, class Steps>
void describe(Call<T>& call, const PassInputs& inputs, Steps* steps) {
  const Problem& p = call.p;
  call.in.prior = operand(inputs.prior, {p.B, p.J});
  steps->in = call.in;
  steps->query = operand(inputs.query, {p.B, p.J, p.D});
}

}  // namespace

template <class T>
void Engine::pass_forward(const Problem& p, const PassInputs& inputs, const PassOutputs& out, const Tensor& like) {
  check(p);
  if (p.B == 0) return;
  const gpu::Context context(like);
  Call<T> call(p, context, false, Family::general);
  PassForwardSteps<T> steps{};
  steps.first = operand(out.first, {p.B, p.J, p.D});
  steps.mass = operand(out.mass, {p.B, p.J});
  steps.weights = operand(out.weights, {p.B, p.I, p.J});
  steps.lse = operand(out.lse, {p.B, p.softmax_in() ? p.J : p.I});
  if (p.softmax_in()) {
    const Global<T> norm(static_cast<T*>(out.norm), 2 * call.scalars());
    steps.max = norm.from(0, call.scalars());
    steps.scale = norm.from(call.scalars(), call.scalars());
  }
  describe(call, inputs, &steps);
  call.with([&] {
    if (steps.query.data) steps.V = call.template take<T>(call.vectors());
    steps.parts = call.take_parts(p.softmax_in());
    if (call.plan.row_norm_apart) call.take_row_norms(1);
  });
  call.run(steps);
}

template <class T>
void Engine::pass_backward(const Problem& p, const PassInputs& inputs, const PassSaved& saved, const PassGradients& out,
                           const Tensor& like) {
  check(p);
  if (p.B == 0 || p.J == 0) return;
  const bool wanted = wants_gradient(p, out.common);
  const gpu::Context context(like);
  Call<T> call(p, context, true, Family::general);
  const GeneralPlan& plan = call.plan;
  typename Call<T>::Gradient gradient{};
  PassBackwardSteps<T> steps{};
  steps.dfirst = operand(saved.dfirst, {p.B, p.J, p.D});
  steps.first = operand(saved.first, {p.B, p.J, p.D});
  steps.mass = operand(saved.mass, {p.B, p.J});
  steps.weights = operand(saved.weights, {p.B, p.I, p.J});
  steps.dquery = operand(out.dquery, {p.B, p.J, p.D});
  steps.dprior = operand(out.dprior, {p.B, p.J});
  steps.scoring.dcoupling = operand(saved.dweights, {p.B, p.I, p.J});
  steps.scoring.dmass = operand(saved.dmass, {p.B, p.J});
  steps.scoring.dlse = operand(saved.dlse, {p.B, p.softmax_in() ? p.J : p.I});
  describe(call, inputs, &steps);
  if (wanted) gradient = call.plan_gradient(out.common);
  call.with([&] {
    if (steps.query.data) steps.V = call.template take<T>(call.vectors());
    steps.ds = call.template take<T>(call.vectors());
    if (p.softmax_in()) steps.mean = call.template take<T>(call.scalars());
    steps.parts = call.take_parts(false, steps.passes() > 0);
    if (plan.row_norm_apart) call.take_row_norms(1);
    call.take_sums(&gradient);
  });
  steps.scoring.V = steps.V;
  steps.scoring.ds = steps.ds;
  if (p.softmax_in()) {
    const Global<const T> norm(static_cast<const T*>(saved.norm), 2 * call.scalars());
    steps.columns = {norm.from(0, call.scalars()), norm.from(call.scalars(), call.scalars()), steps.mean};
  }
  call.run(steps);
  if (!wanted) return;
  GradientArgs<T>& args = gradient.args;
  args.scored = steps.V ? 0 : 1;
  args.V = steps.V;
  args.ds = steps.ds;
  args.dcoupling = steps.scoring.dcoupling;
  args.dmass = steps.scoring.dmass;
  args.dlse = steps.scoring.dlse;
  args.norm = steps.columns;
  if (plan.row_norm_apart) {
    // If there was an accumulating pass, its normaliser is still there.
    if (steps.passes() == 0) call.row_norm(steps.scoring, 0);
    args.norm = call.row_norms();
  }
  call.run(gradient, out.common);
}

template void Engine::pass_forward<float>(const Problem&, const PassInputs&, const PassOutputs&, const Tensor&);
template void Engine::pass_forward<double>(const Problem&, const PassInputs&, const PassOutputs&, const Tensor&);
template void Engine::pass_backward<float>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&,
                                           const Tensor&);
template void Engine::pass_backward<double>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&,
                                            const Tensor&);

}  // namespace capsfast::cuda
