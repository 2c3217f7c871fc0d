// The backward: from the last iteration to the second a reducing pass each, then one last pass for all.
#include "call.h"

namespace capsfast::cuda {

namespace {

template <class T>
class Backward {
 public:
  Backward(const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs, const Tensor& like)
      : call(problem, like),
        p(problem),
        given(inputs),
        out(outputs),
        first(p.gradient_last ? p.iterations - 1 : 0),
        dcoupling(operand(inputs.dcoupling, {p.B, p.I, p.J})),
        s(static_cast<const T*>(inputs.s), p.iterations * call.vectors()),
        V(call.template scratch<T>(p.iterations * call.vectors())),
        ds(call.template scratch<T>(p.iterations * call.vectors())),
        G(call.template scratch<T>(call.vectors())),
        mean(call.template scratch<T>(p.softmax_in ? p.iterations * call.scalars() : 0)) {
    if (p.softmax_in) {
      const Global<const T> norm(static_cast<const T*>(inputs.norm), 2 * p.iterations * call.scalars());
      columns = {norm.from(0, p.iterations * call.scalars()), norm.from(p.iterations * call.scalars(), p.iterations * call.scalars()), mean};
    }
    if (call.plan.rows_apart || call.plan.final_rows_apart) {
      for (Global<T>* array : {&row_max, &row_scale, &row_mean}) *array = call.template scratch<T>(p.iterations * row_count());
    }
  }

  void run() {
    call.per_output(restore_kernel<T>, RestoreArgs<T>{call.in, call.squash, p.iterations, s, V});
    Parts<T> parts{};
    differentiate(p.iterations - 1, parts, false);
    if (p.iterations - 1 > first) parts = call.parts(false);
    for (int64_t t = p.iterations - 1; t > first; --t) {
      ReduceArgs<T> pass{};
      pass.in = call.in;
      pass.scoring = scoring(t);
      if (p.softmax_in) pass.norm = at(columns, t, call.scalars());
      if (call.plan.rows_apart) pass.norm = rows(t, true);
      call.reduce(pass, parts);
      differentiate(t - 1, parts, t == p.iterations - 1);
    }
    if (out.dbias.data != nullptr) sum_bias();
    if (p.I > 0 && (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr)) last_pass();
  }

 private:
  int64_t row_count() const { return p.B * p.I; }
  bool wants_logits() const { return out.dlogits.data != nullptr; }

  static Normaliser<T> at(const Normaliser<T>& all, int64_t t, int64_t count) {
    return {all.max.from(t * count, count), all.scale.from(t * count, count), all.mean.from(t * count, count)};
  }

  Scoring<T> scoring(int64_t t) const {
    Scoring<T> with;
    if (t > 0) with.V = V.from(t * call.vectors(), call.vectors());
    with.ds = ds.from(t * call.vectors(), call.vectors());
    if (t + 1 == p.iterations) with.dcoupling = dcoupling;
    return with;
  }

  // The normaliser of iteration t over the output capsules, in a sweep of its own.
  Normaliser<T> rows(int64_t t, bool with_dc) const {
    const int64_t from = t * row_count(), count = row_count();
    Scoring<T> with = scoring(t);
    if (!with_dc) with.ds = {};
    call.rows({call.in, with, row_max.from(from, count), row_scale.from(from, count), row_mean.from(from, count)});
    return {row_max.from(from, count), row_scale.from(from, count), row_mean.from(from, count)};
  }

  void differentiate(int64_t t, const Parts<T>& parts, bool first_parts) const {
    DifferentiateArgs<T> args{};
    args.in = call.in;
    args.squash = call.squash;
    if (t + 1 == p.iterations) {
      args.dv = operand(given.dv, {p.B, p.J, p.D});
      args.coupling = operand(given.coupling, {p.B, p.I, p.J});
      args.dcoupling = dcoupling;
    }
    args.parts = parts;
    args.first = first_parts;
    args.G = G;
    args.s = s.from(t * call.vectors(), call.vectors());
    args.ds = ds.from(t * call.vectors(), call.vectors());
    if (p.softmax_in) args.mean = mean.from(t * call.scalars(), call.scalars());
    call.per_output(differentiate_kernel<T>, args);
  }

  void sum_bias() const {
    const int64_t rows = p.J * p.D, count = (p.iterations - first) * p.B;
    const Global<T> from = ds.from(first * call.vectors(), (p.iterations - first) * call.vectors());
    gpu::launch(bias_kernel<T>, {divide_up(rows, kThreads / kSumLanes), 1, 1}, kThreads, kThreads * 8, call.context.stream(),
                BiasArgs<T>{count, rows, from, operand(out.dbias, {p.J, p.D})});
  }

  void last_pass() {
    if (call.tile_final_fits(p.iterations - first)) return last_pass_of_tiles();
    const GeneralPlan& plan = call.plan;
    FinalArgs<T> args{};
    args.in = call.in;
    args.first = first;
    args.iterations = p.iterations;
    args.gradient_last = p.gradient_last;
    args.outputs = FinalTile<T>::outputs_for(p.J, p.D);
    args.components = FinalTile<T>::components_for(p.D);
    args.V = V;
    args.ds = ds;
    args.dcoupling = dcoupling;
    args.shared_weight = p.shared_weight;
    if (p.softmax_in) args.norm = columns;
    if (plan.final_rows_apart) {
      for (int64_t t = first; t < p.iterations; ++t) {
        // The reducing passes have left theirs.
        if (!(plan.rows_apart && t > first)) rows(t, wants_logits() || (t > 0 && !p.gradient_last));
      }
      args.norm = {row_max, row_scale, row_mean};
    }
    if (p.votes_given) {
      args.dvotes = operand(out.dweight, {p.B, p.I, p.J, p.D});
    } else {
      args.du = operand(out.du, {p.B, p.I, p.K});
    }
    const int64_t weights = p.votes_given || out.dweight.data == nullptr ? 0 : out.weight_rows * p.J * p.D * p.K;
    const int64_t weight_parts = plan.final_splits * (p.shared_weight ? plan.final_blocks : 1);
    if (weights > 0) args.dweight = call.template scratch<double>(weight_parts * weights);
    const int64_t logits = wants_logits() && !out.per_sample_logits ? p.I * p.J : 0;
    if (logits > 0) args.dlogits = call.template scratch<double>(plan.final_splits * logits);
    if (out.per_sample_logits) args.dlogits_sample = operand(out.dlogits, {p.B, p.I, p.J});
    call.kernels().final(args, {{plan.final_blocks, plan.final_splits, 1}, call.context.stream()});
    if (weights > 0) call.join(args.dweight, weight_parts, weights, out.dweight);
    if (logits > 0) call.join(args.dlogits, plan.final_splits, logits, out.dlogits);
  }

  void last_pass_of_tiles() {
    if constexpr (std::is_same_v<T, float>) {
      const TilePlan& plan = call.tiles;
      TileFinalArgs args{};
      args.in = call.in;
      args.first = first;
      args.iterations = p.iterations;
      args.gradient_last = p.gradient_last;
      args.V = V;
      args.ds = ds;
      args.dcoupling = dcoupling;
      args.shared_weight = p.shared_weight;
      args.du = operand(out.du, {p.B, p.I, p.K});
      const int64_t weights = out.dweight.data == nullptr ? 0 : out.weight_rows * p.J * p.D * p.K;
      const int64_t weight_parts = plan.final_parts * (p.shared_weight ? plan.final_splits : 1);
      if (weights > 0) args.dweight = call.template scratch<float>(weight_parts * weights);
      const int64_t logits = wants_logits() && !out.per_sample_logits ? p.I * p.J : 0;
      if (logits > 0) args.dlogits = call.template scratch<double>(plan.final_parts * logits);
      if (out.per_sample_logits) args.dlogits_sample = operand(out.dlogits, {p.B, p.I, p.J});
      call.tile_final(args);
      if (weights > 0) call.join(args.dweight, weight_parts, weights, out.dweight);
      if (logits > 0) call.join(args.dlogits, plan.final_parts, logits, out.dlogits);
    }
  }

  Call<T> call;
  const Problem& p;
  const BackwardInputs& given;
  const BackwardOutputs& out;
  int64_t first;
  Operand dcoupling;
  Global<const T> s;
  Global<T> V, ds, G, mean;
  Normaliser<T> columns;
  Global<T> row_max, row_scale, row_mean;
};

}  // namespace

template <class T>
void backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out, const Tensor& like) {
  if (p.B == 0 || p.J == 0) return;
  Backward<T>(p, in, out, like).run();
}

template void backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);
template void backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&, const Tensor&);

}  // namespace capsfast::cuda
