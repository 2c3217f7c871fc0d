// A linear pass is one iteration of routing without a squash, with the query as V. It runs the general accumulating
// pass, whose sums are the moments. In the backward its sums are dquery and dprior; the gradient pass computes the
// rest.
#include <torch/headeronly/util/Exception.h>

#include "engine.h"
#include "launch.h"
#include "moments.h"

namespace capsfast::cuda {

namespace {

// What forward and backward share.
template <class T>
struct Pass {
  Pass(const Problem& problem, const PassInputs& inputs, const Tensor& like, bool backward)
      : call(problem, like, {backward, false}), p(problem), in(call.in) {
    in.prior = operand(inputs.prior, {p.B, p.J});
    if (inputs.query.data == nullptr) return;
    const Global<T> V = call.template scratch<T>(call.vectors());
    step(QueryArgs<T>{in, operand(inputs.query, {p.B, p.J, p.D}), V});
    scoring.V = V;
  }

  // The normaliser of the softmax over the output capsules, if a separate sweep computes it.
  Normaliser<T> row_norm() { return call.row_norm(in, scoring, call.row_norm_scratch(1), 0); }

  AccumulateArgs<T> accumulating(const Parts<T>& parts) const {
    AccumulateArgs<T> args{};
    args.in = in;
    args.scoring = scoring;
    args.mass = true;
    args.sum = parts.sum;
    return args;
  }

  void accumulate(const AccumulateArgs<T>& args) const {
    if (p.I > 0) call.general_accumulate(args);
  }

  template <class Args>
  void step(const Args& args) const {
    call.per_output(step_kernel<Args>, args);
  }

  Call<T> call;
  const Problem& p;
  Inputs in;
  Scoring<T> scoring{};
};

void check(const Problem& p) {
  const char* lacking = why_no_pass(p);
  STD_TORCH_CHECK(lacking == nullptr, "capsfast: the CUDA kernels of a pass do not serve ", lacking);
}

}  // namespace

template <class T>
void Engine::pass_forward(const Problem& p, const PassInputs& inputs, const PassOutputs& out, const Tensor& like) {
  check(p);
  if (p.B == 0) return;
  Pass<T> pass(p, inputs, like, false);
  Call<T>& call = pass.call;
  const Operand weights = operand(out.weights, {p.B, p.I, p.J}),
                lse = operand(out.lse, {p.B, p.softmax_in() ? p.J : p.I});
  MomentArgs<T> moments{};
  moments.in = pass.in;
  moments.parts = call.parts(p.softmax_in());
  moments.unweighted = !pass.scoring.V && !pass.in.prior.data && !pass.in.logits.data && !weights.data && !lse.data &&
                       !(p.softmax_in() && pass.in.mask.data);
  moments.first = operand(out.first, {p.B, p.J, p.D});
  moments.mass = operand(out.mass, {p.B, p.J});
  AccumulateArgs<T> accumulate = pass.accumulating(moments.parts);
  accumulate.unweighted = moments.unweighted;
  if (p.softmax_in()) {
    const Global<T> norm(static_cast<T*>(out.norm), 2 * call.scalars());
    moments.max = norm.from(0, call.scalars());
    moments.scale = norm.from(call.scalars(), call.scalars());
    moments.lse = lse;
    if (!accumulate.unweighted) {
      accumulate.max = moments.parts.max;
      accumulate.total = moments.parts.total;
    }
  } else {
    accumulate.coupling = weights;
    accumulate.lse = lse;
    if (call.plan.row_norm_apart && !accumulate.unweighted) accumulate.norm = pass.row_norm();
  }
  pass.accumulate(accumulate);
  pass.step(moments);
  if (!p.softmax_in() || !weights.data) return;
  // One more pass writes the coupling. Its normaliser is known now, and it forms no sums.
  AccumulateArgs<T> write = pass.accumulating({});
  write.norm = {moments.max, moments.scale, {}};
  write.coupling = weights;
  pass.accumulate(write);
}

template <class T>
void Engine::pass_backward(const Problem& p, const PassInputs& inputs, const PassSaved& saved, const PassGradients& out,
                           const Tensor& like) {
  check(p);
  if (p.B == 0 || p.J == 0) return;
  Pass<T> pass(p, inputs, like, true);
  Call<T>& call = pass.call;
  MomentGradientArgs<T> gradients{};
  gradients.in = pass.in;
  gradients.dfirst = operand(saved.dfirst, {p.B, p.J, p.D});
  gradients.first = operand(saved.first, {p.B, p.J, p.D});
  gradients.dmass = operand(saved.dmass, {p.B, p.J});
  gradients.mass = operand(saved.mass, {p.B, p.J});
  gradients.dweights = operand(saved.dweights, {p.B, p.I, p.J});
  gradients.weights = operand(saved.weights, {p.B, p.I, p.J});
  gradients.ds = call.template scratch<T>(call.vectors());
  Normaliser<T> norm;
  if (p.softmax_in()) {
    gradients.mean = call.template scratch<T>(call.scalars());
    const Global<const T> columns(static_cast<const T*>(saved.norm), 2 * call.scalars());
    norm = {columns.from(0, call.scalars()), columns.from(call.scalars(), call.scalars()), gradients.mean};
  }
  pass.step(gradients);
  pass.scoring.ds = gradients.ds;
  pass.scoring.dmass = gradients.dmass;
  pass.scoring.dcoupling = gradients.dweights;
  pass.scoring.dlse = operand(saved.dlse, {p.B, p.softmax_in() ? p.J : p.I});
  if (call.plan.row_norm_apart || call.plan.gradient_row_norm_apart) norm = pass.row_norm();

  if (out.dquery.data != nullptr || out.dprior.data != nullptr) {
    MomentArgs<T> sums{};
    sums.in = pass.in;
    sums.parts = call.parts(false);
    sums.first = operand(out.dquery, {p.B, p.J, p.D});
    sums.mass = operand(out.dprior, {p.B, p.J});
    AccumulateArgs<T> accumulate = pass.accumulating(sums.parts);
    accumulate.norm = norm;
    pass.accumulate(accumulate);
    pass.step(sums);
  }
  if (!wants_gradient(p, out.common)) return;
  GradientArgs<T> last = gradient_args<T>(p, out.common);
  last.in = pass.in;
  last.iterations = 1;
  last.scored = pass.scoring.V ? 0 : 1;
  last.V = pass.scoring.V;
  last.ds = pass.scoring.ds;
  last.dcoupling = pass.scoring.dcoupling;
  last.dmass = pass.scoring.dmass;
  last.dlse = pass.scoring.dlse;
  last.norm = norm;
  general_gradient(call, out.common, last);
}

template void Engine::pass_forward<float>(const Problem&, const PassInputs&, const PassOutputs&, const Tensor&);
template void Engine::pass_forward<double>(const Problem&, const PassInputs&, const PassOutputs&, const Tensor&);
template void Engine::pass_backward<float>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&,
                                           const Tensor&);
template void Engine::pass_backward<double>(const Problem&, const PassInputs&, const PassSaved&, const PassGradients&,
                                            const Tensor&);

}  // namespace capsfast::cuda
