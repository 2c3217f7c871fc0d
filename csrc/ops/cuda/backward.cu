// The backward: an accumulating pass for each iteration from the last to the second, then one gradient pass for all
// iterations.
#include "engine.h"
#include "launch.h"
#include "steps.h"
#include "votes/launch.h"

namespace capsfast::cuda {

namespace {

template <class T>
class Backward {
 public:
  Backward(const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, const Tensor& like)
      : call(problem, like, true, inputs.dcoupling.data != nullptr || outputs.dlogits.data != nullptr),
        p(problem),
        out(outputs) {
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
    if (steps.passes() > 0) steps.parts = call.parts(false);
    if (call.plan.row_norm_apart || call.plan.gradient_row_norm_apart) {
      for (Global<T>* array : {&row_max, &row_scale, &row_mean})
        *array = call.template scratch<T>(p.iterations * row_count());
    }
  }

  void run() {
    if (!call.template run_together<true>(steps)) run_apart();
    if (out.dbias.data != nullptr) sum_bias();
    if (wants_gradient(p, out)) last();
  }

 private:
  void run_apart() {
    call.per_output(restore_kernel<T>, steps.restore());
    call.per_output(differentiate_kernel<T>, steps.differentiate(p.iterations - 1));
    for (int64_t n = 0; n < steps.passes(); ++n) {
      const int64_t t = steps.iteration_of(n);
      Normaliser<T> row_norm;
      if (call.plan.row_norm_apart) row_norm = rows(t, true);
      call.template accumulate<true>(steps, n, call.plan.row_norm_apart ? &row_norm : nullptr);
      call.per_output(differentiate_kernel<T>, steps.differentiate(t - 1));
    }
  }

  int64_t row_count() const { return p.B * p.I; }
  bool wants_logits() const { return out.dlogits.data != nullptr; }

  // Computes the normaliser of the softmax over the output capsules in iteration t, in a sweep of its own. with_dc:
  // also sum_j c dc.
  Normaliser<T> rows(int64_t t, bool with_dc) const {
    const int64_t from = t * row_count(), count = row_count();
    Scoring<T> with = steps.scoring(t);
    if (!with_dc) with.ds = {};
    call.row_norm({call.in, with, row_max.from(from, count), row_scale.from(from, count), row_mean.from(from, count)});
    return {row_max.from(from, count), row_scale.from(from, count), row_mean.from(from, count)};
  }

  void sum_bias() const {
    const int64_t terms = p.iterations - steps.first, size = steps.order.size(p.B);
    call.sum_vectors(steps.ds.from(steps.first * size, terms * size), terms, p.B, steps.order, out.dbias);
  }

  void last() {
    if constexpr (std::is_same_v<T, float>) {
      if (call.by_rows) return by_rows();
    }
    const GeneralPlan& plan = call.plan;
    GradientArgs<T> general = gradient_args<T>(p, out);
    describe(&general);
    general.scored = 1;
    if (p.softmax_in()) general.norm = steps.columns;
    if (plan.gradient_row_norm_apart) {
      for (int64_t t = steps.first; t < p.iterations; ++t) {
        // If the accumulating passes had a sweep too, its normalisers are still there.
        if (!(plan.row_norm_apart && t > steps.first)) rows(t, wants_logits() || (t > 0 && !p.gradient_last));
      }
      general.norm = {row_max, row_scale, row_mean};
    }
    general_gradient(call, out, general);
  }

  void by_rows() {
    if constexpr (std::is_same_v<T, float>) {
      const bool with_dlogits = wants_logits() && !out.per_sample_logits;
      const rows::GradientPlan plan = call.by_rows->plan_gradient(with_dlogits);
      rows::GradientArgs args{};
      describe(&args);
      args.order = steps.order;
      if (p.softmax_in()) args.norm = steps.columns;
      gradient_pass(call, out, args, plan.parts, plan.splits,
                    [&](const rows::GradientArgs& with) { call.by_rows->gradient(with, plan); });
    }
  }

  // Sets what the kernels of all gradient passes are told alike.
  template <class Args>
  void describe(Args* args) const {
    args->in = call.in;
    args->first = static_cast<decltype(args->first)>(steps.first);
    args->iterations = static_cast<decltype(args->first)>(p.iterations);
    args->gradient_last = p.gradient_last;
    args->V = steps.V;
    args->ds = steps.ds;
    args->dcoupling = steps.dcoupling;
  }

  Call<T> call;
  const Problem& p;
  const BackwardOutputs& out;
  BackwardSteps<T> steps{};
  Global<T> row_max, row_scale, row_mean;
};

}  // namespace

template <class T>
void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0 || votes_backward(p, in, out, like)) return;
  Backward<T>(p, in, out, like).run();
}

template void backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);
template void backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
