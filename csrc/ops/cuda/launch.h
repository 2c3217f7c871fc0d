// What forward and backward of the general and the rows family share: scratch memory, launches.
#pragma once

#include <optional>
#include <type_traits>

#include "engine.h"
#include "family.h"
#include "general/kernels.h"
#include "operands.h"
#include "rows/launch.h"
#include "scratch.h"
#include "steps.h"

namespace capsfast::cuda {

template <class T>
class Call : public Scratch {
 public:
  Call(const Problem& problem, const gpu::Context& on, bool backward, Family family)
      : Scratch(on),
        p(problem),
        context(on),
        in(inputs_of(problem)),
        plan(plan_general<T>(problem, context.multiprocessors)),
        squash{problem.squash, operand(problem.bias, {problem.J, problem.D})} {
    if constexpr (kNarrow) {
      if (family == Family::rows) by_rows.emplace(p, in, backward, context);
    }
  }

  // The order of V and ds, and memory for `count` arrays in this order. Padding must be 0.
  VectorOrder order() const { return by_rows ? by_rows->order() : VectorOrder{p.J, p.D, 0}; }
  Global<T> take_vectors(int64_t count) {
    const VectorOrder of = order();
    return this->template take<T>(count * of.size(p.B), of.padded(p.B));
  }

  // Memory for the partial sums of a pass, if there is any. with_columns: also for the maxima and totals of the softmax
  // over the input capsules.
  Parts<T> take_parts(bool with_columns, bool any = true) {
    Parts<T> to{};
    to.work = by_rows ? by_rows->work() : Work{p.I, p.B, 1, plan.splits};
    const int64_t rows = to.work.segments() * to.work.group * p.J;
    if (!any) return to;
    if (by_rows) {
      to.sum_rows = this->template take<float>(rows * p.D);
    } else {
      to.sum = this->template take<double>(rows * (p.D + p.moments));
    }
    if (with_columns) {
      to.max = this->template take<T>(rows);
      to.total = this->template take<double>(rows);
    }
    return to;
  }

  // Memory for `count` normalisers [B, I] of the softmax over the output capsules, which a sweep of its own computes.
  void take_row_norms(int64_t count) {
    const int64_t size = count * p.B * p.I;
    if (count > 0)
      row_norms_ = {this->template take<T>(size), this->template take<T>(size), this->template take<T>(size)};
  }
  Normaliser<T> row_norms() const { return {row_norms_.max, row_norms_.scale, row_norms_.mean}; }
  // Computes normaliser n, for tiles that do not hold all output capsules.
  Normaliser<T> row_norm(const Scoring<T>& scoring, int64_t n) const {
    const int64_t count = p.B * p.I;
    const auto part = [&](const Global<T>& all) { return all.from(n * count, count); };
    const RowNormArgs<T> args{in, scoring, part(row_norms_.max), part(row_norms_.scale), part(row_norms_.mean)};
    if (p.I > 0)
      launch(kernels().row_norm, {plan.input_tiles, grid_rows(plan.tiles), 1}, kernels().accumulate_bytes, args);
    return {args.max, args.scale, args.mean};
  }

  // Runs all passes and updates.
  template <class Steps>
  void run(const Steps& steps) const {
    if constexpr (kNarrow && Steps::routing) {
      // One cooperative launch, unless the device does not run all blocks at the same time.
      if (by_rows && by_rows->together() && steps.passes() > 0 &&
          by_rows->template accumulate<Steps::backward>(steps, Steps::begin, steps.passes(), true))
        return;
    }
    for (int64_t n = Steps::begin; n < steps.passes(); ++n) {
      if (n >= 0) accumulate(steps, n);
      if (steps.updates(n)) update(UpdateArgs<Steps>{steps, n});
    }
  }

  // How a gradient pass is cut, its partial sums, and its arguments except for what the steps know.
  struct Gradient {
    GradientArgs<T> args;
    rows::GradientPlan by_rows;
    int64_t parts, weight_parts;  // of dlogits and of dweight
    int64_t weights, logits;      // numbers in a part
    bool direct;                  // there is one part of dweight: dweight itself
  };
  Gradient plan_gradient(const BackwardOutputs& out) const {
    Gradient to{};
    GradientArgs<T>& args = to.args;
    args.in = in;
    args.iterations = p.iterations;
    args.gradient_last = p.gradient_last;
    args.shared_weight = p.shared_weight;
    if (p.votes_given) {
      args.dvotes = operand(out.dweight, {p.B, p.I, p.J, p.D});
    } else {
      args.du = operand(out.du, {p.B, p.I, p.K});
    }
    if (out.per_sample_logits) args.dlogits_sample = operand(out.dlogits, {p.B, p.I, p.J});
    if (out.dlogits.data != nullptr && !out.per_sample_logits) to.logits = p.I * p.J;
    if (out.dweight.data != nullptr && !p.votes_given) to.weights = out.weight_rows * p.J * p.D * p.K;
    int64_t blocks = plan.gradient_blocks;
    to.parts = plan.gradient_splits;
    if (by_rows) {
      to.by_rows = by_rows->plan_gradient();
      blocks = to.by_rows.splits;
      to.parts = to.by_rows.parts;
    }
    to.weight_parts = to.parts * (p.shared_weight ? blocks : 1);
    to.direct = by_rows && to.weights > 0 && to.weight_parts == 1 && out.dweight.storage == Storage::f32;
    if (to.direct) args.dweight_rows = {static_cast<float*>(out.dweight.data), to.weights};
    return to;
  }
  void take_sums(Gradient* of) {
    const int64_t weights = of->direct ? 0 : of->weight_parts * of->weights;
    if (of->logits > 0) of->args.dlogits = this->template take<double>(of->parts * of->logits);
    if (weights > 0 && by_rows) of->args.dweight_rows = this->template take<float>(weights);
    if (weights > 0 && !by_rows) of->args.dweight = this->template take<double>(weights);
  }

  // Runs the gradient pass and adds up its partial sums.
  void run(const Gradient& with, const BackwardOutputs& out) const {
    const GradientArgs<T>& args = with.args;
    if constexpr (kNarrow) {
      if (by_rows) by_rows->gradient(args, with.by_rows);
    }
    if (!by_rows)
      launch(kernels().gradient, {plan.gradient_blocks, plan.gradient_splits, 1}, kernels().gradient_bytes, args);
    if (args.dweight) join(JoinArgs<double>{with.weight_parts, with.weights, args.dweight, {}}, out.dweight);
    if (args.dweight_rows && !with.direct)
      join(JoinArgs<float>{with.weight_parts, with.weights, args.dweight_rows, {}}, out.dweight);
    if (args.dlogits) join(JoinArgs<double>{with.parts, with.logits, args.dlogits, {}}, out.dlogits);
  }
  // to[n] = sum of the parts.
  template <class N>
  void join(JoinArgs<N> args, const View& to) const {
    args.to = operand(to, {args.size});
    // A thread may take several n in turn, so the size of the grid can be limited.
    const int64_t blocks = std::min<int64_t>(divide_up(args.size * args.lanes, kThreads), 1 << 20);
    launch(join_kernel<N>, {blocks, 1, 1}, 0, args);
  }

  int64_t vectors() const { return p.B * p.J * p.D; }
  int64_t scalars() const { return p.B * p.J; }

  const Problem& p;
  const gpu::Context& context;
  Inputs in;
  const GeneralPlan plan;
  const BiasedSquashing squash;
  std::optional<rows::Launcher> by_rows;  // if the rows family serves the call

 private:
  static constexpr bool kNarrow = std::is_same_v<T, float>;

  const GeneralKernels<T>& kernels() const {
    if constexpr (kNarrow) {
      const Storage storage = p.votes_given ? p.votes.storage : p.u.storage;
      if (storage == Storage::bf16) return general_kernels<BFloat16>(p.votes_given);
      if (storage == Storage::f16) return general_kernels<Float16>(p.votes_given);
      return general_kernels<float>(p.votes_given);
    } else {
      return general_kernels<double>(p.votes_given);
    }
  }

  template <class Args>
  void launch(gpu::Kernel<Args> kernel, const gpu::Grid& grid, int shared_bytes, const Args& args) const {
    gpu::launch(kernel, grid, kThreads, shared_bytes, context.stream, args);
  }
  // The y axis of a grid has at most 65535 blocks. Blocks of these kernels take several tiles in turn.
  static int64_t grid_rows(int64_t tiles) { return std::clamp<int64_t>(tiles, 1, 65535); }

  template <class Steps>
  void accumulate(const Steps& steps, int64_t n) const {
    if (p.I == 0) return;
    if constexpr (kNarrow && Steps::routing) {
      if (by_rows) return static_cast<void>(by_rows->template accumulate<Steps::backward>(steps, n, n + 1, false));
    }
    AccumulateArgs<T> pass = steps.pass(n);
    if (plan.row_norm_apart && !pass.unweighted) pass.norm = row_norm(pass.scoring, steps.row_norm(n));
    const int bytes = kernels().accumulate_bytes + (pass.to.max ? kernels().bytes_to_follow : 0);
    launch(kernels().accumulate, {plan.out_tiles, grid_rows(plan.tiles), plan.splits}, bytes, pass);
  }

  template <class Steps>
  void update(const UpdateArgs<Steps>& args) const {
    if (scalars() == 0) return;
    // A warp may take several output capsules in turn, so the size of the grid can be limited.
    const int64_t blocks = std::min<int64_t>(divide_up(scalars(), kThreads / 32), 1 << 20);
    launch(update_kernel<Steps>, {blocks, 1, 1}, 0, args);
  }

  struct {
    Global<T> max, scale, mean;
  } row_norms_;
};

// Whether a gradient pass has anything to write: du, dweight or dvotes, or dlogits.
inline bool wants_gradient(const Problem& p, const BackwardOutputs& out) {
  return p.I > 0 && (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr);
}

}  // namespace capsfast::cuda
