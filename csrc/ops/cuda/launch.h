// What forward and backward share: arguments of kernels, scratch memory, launches.
#pragma once

#include <initializer_list>
#include <optional>
#include <type_traits>

#include "../../cuda/context.h"
#include "../../cuda/memory.h"
#include "choose.h"
#include "engine.h"
#include "general/kernels.h"
#include "rows/launch.h"
#include "steps.h"

namespace capsfast::cuda {

// How many elements of memory a strided tensor spans, from its first to its last.
inline int64_t extent(std::initializer_list<int64_t> sizes, const int64_t* stride) {
  int64_t last = 0;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
    last += (size - 1) * *stride++;
  }
  return last + 1;
}

inline Operand operand(const View& view, std::initializer_list<int64_t> sizes) {
  Operand to;
  if (view.data == nullptr) return to;
  to.data = {static_cast<unsigned char*>(view.data), extent(sizes, view.stride) * element_bytes(view.storage)};
  to.storage = view.storage;
  for (int axis = 0; axis < 4; ++axis) to.stride[axis] = view.stride[axis];
  return to;
}

inline Mask mask(const MaskView& view, int64_t rows, int64_t columns) {
  Mask to;
  if (view.data == nullptr) return to;
  to.data = {view.data, extent({rows, columns}, view.stride)};
  to.stride[0] = view.stride[0];
  to.stride[1] = view.stride[1];
  return to;
}

inline Inputs inputs_of(const Problem& p) {
  Inputs in{p.B, p.I, p.J, p.D, p.K, p.softmax_in(), p.leaky, {}, {}, {}, {}, {}, {}};
  if (p.votes_given) {
    in.matrix = operand(p.votes, {p.B, p.I, p.J, p.D});
  } else {
    in.u = operand(p.u, {p.B, p.I, p.K});
    in.matrix = operand(p.weight, {p.I, p.J, p.D, p.K});
  }
  in.logits = operand(p.logits, {p.B, p.I, p.J});
  in.mask = mask(p.mask, p.B, p.I);
  in.out_mask = mask(p.out_mask, p.B, p.J);
  return in;
}

// What decides, besides the problem, which family serves a call.
struct Wanted {
  bool backward;
  bool coupling;  // see rows::choose
};

template <class T>
class Call {
 public:
  Call(const Problem& problem, const Tensor& like, const Wanted& wanted)
      : p(problem),
        context(like),
        in(inputs_of(problem)),
        plan(plan_general<T>(problem, context.multiprocessors())),
        squash{problem.squash, operand(problem.bias, {problem.J, problem.D})},
        memory_(like) {
    if constexpr (kNarrow) {
      if (why_no_rows(problem, gpu::architecture(join_kernel<float>)) == nullptr)
        by_rows.emplace(p, in, wanted.backward, wanted.coupling, context);
    }
  }

  // Uninitialised memory that is released with this object.
  template <class N>
  Global<N> scratch(int64_t count, bool zeroed = false) {
    return {static_cast<N*>(memory_.allocate(count * static_cast<int64_t>(sizeof(N)), zeroed)), count};
  }

  // The order of V and ds, and memory for `count` arrays in this order. Padding must be 0.
  VectorOrder order() const { return by_rows ? by_rows->order() : VectorOrder{p.J, p.D, 0}; }
  Global<T> vector_scratch(int64_t count) {
    const VectorOrder of = order();
    return scratch<T>(count * of.size(p.B), of.padded(p.B));
  }

  // Memory for the partial sums of a pass, if there is any. with_columns: also for the maxima and totals of the softmax
  // over the input capsules.
  Parts<T> parts(bool with_columns, bool any = true) {
    Parts<T> to{};
    to.work = by_rows ? by_rows->work() : Work{p.I, p.B, 1, plan.splits};
    const int64_t rows = to.work.segments() * to.work.group * p.J;
    if (!any) return to;
    if (by_rows) {
      to.sum_rows = scratch<float>(rows * p.D);
    } else {
      to.sum = scratch<double>(rows * (p.D + p.moments));
    }
    if (with_columns) {
      to.max = scratch<T>(rows);
      to.total = scratch<double>(rows);
    }
    return to;
  }

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

  // Runs all passes and updates. row_norm(n) is the normaliser of pass n, if a sweep of its own computes it.
  template <class Steps, class RowNorm>
  void run(const Steps& steps, const RowNorm& row_norm) const {
    constexpr bool kBackward = Steps::backward;
    constexpr int64_t kFirst = kBackward ? -1 : 0;
    if constexpr (kNarrow) {
      // One cooperative launch, unless the device does not run all blocks at the same time.
      if (by_rows && by_rows->together() && steps.passes() > 0 &&
          by_rows->template accumulate<kBackward>(steps, kFirst, steps.passes(), true))
        return;
    }
    for (int64_t n = kFirst; n < steps.passes(); ++n) {
      if (n >= 0) accumulate(steps, n, row_norm);
      if (steps.updates(n)) per_output(update_kernel<Steps>, UpdateArgs<Steps>{steps, n});
    }
  }

  // An accumulating pass of the general kernel. There are input capsules.
  void general_accumulate(const AccumulateArgs<T>& pass) const {
    kernels().accumulate(pass, {{plan.out_tiles, grid_rows(plan.tiles), plan.splits}, context.stream()});
  }

  // Memory for `count` normalisers [B, I] of the softmax over the output capsules.
  struct RowNorms {
    Global<T> max, scale, mean;
    Normaliser<T> all() const { return {max, scale, mean}; }
  };
  RowNorms row_norm_scratch(int64_t count) {
    if (count == 0) return {};
    const int64_t size = count * p.B * p.I;
    return {scratch<T>(size), scratch<T>(size), scratch<T>(size)};
  }
  // Computes normaliser n of `to`, for tiles that do not hold all output capsules.
  Normaliser<T> row_norm(const Inputs& inputs, const Scoring<T>& scoring, const RowNorms& to, int64_t n) const {
    const int64_t count = p.B * p.I;
    const Global<T> max = to.max.from(n * count, count), scale = to.scale.from(n * count, count),
                    mean = to.mean.from(n * count, count);
    if (p.I > 0)
      kernels().row_norm({inputs, scoring, max, scale, mean},
                         {{divide_up(p.I, AccumulateTile<T>::inputs), grid_rows(plan.tiles), 1}, context.stream()});
    return {max, scale, mean};
  }

  // Launches a kernel whose warps take one output capsule of a sample at a time.
  template <class Args>
  void per_output(void (*kernel)(Args), const Args& args) const {
    if (scalars() == 0) return;
    // A warp may take several output capsules in turn, so the size of the grid can be limited.
    const int64_t blocks = std::min<int64_t>(divide_up(scalars(), kThreads / 32), 1 << 20);
    gpu::launch(kernel, {blocks, 1, 1}, kThreads, 0, context.stream(), args);
  }

  // to[n] = sum of from[part, n] over `parts` parts, n < size.
  template <class N>
  void join(const Global<N>& from, int64_t parts, int64_t size, const View& to) const {
    // A thread may take several n in turn, so the size of the grid can be limited.
    const int64_t blocks = std::min<int64_t>(divide_up(size, kThreads), 1 << 20);
    gpu::launch(join_kernel<N>, {blocks, 1, 1}, kThreads, 0, context.stream(),
                JoinArgs<N>{parts, size, from, operand(to, {size})});
  }

  // to [J, D] = sum of `from`, `iterations` arrays [B, J, D] in the order `of`, over iterations and B.
  template <class N>
  void sum_vectors(const Global<N>& from, int64_t iterations, int64_t B, const VectorOrder& of, const View& to) const {
    const int64_t rows = of.J * of.D;
    gpu::launch(bias_kernel<N>, {divide_up(rows, kThreads / kSumLanes), 1, 1}, kThreads, kThreads * 8, context.stream(),
                BiasArgs<N>{iterations, B, of, from, operand(to, {rows})});
  }

  int64_t vectors() const { return p.B * p.J * p.D; }
  int64_t scalars() const { return p.B * p.J; }
  // The y axis of a grid has at most 65535 blocks. Blocks of these kernels take several tiles in turn.
  static int64_t grid_rows(int64_t tiles) { return std::clamp<int64_t>(tiles, 1, 65535); }

  const Problem& p;
  const gpu::Context context;
  const Inputs in;
  const GeneralPlan plan;
  const BiasedSquashing squash;
  std::optional<rows::Launcher> by_rows;  // if the rows family serves the call

 private:
  static constexpr bool kNarrow = std::is_same_v<T, float>;

  template <class Steps, class RowNorm>
  void accumulate(const Steps& steps, int64_t n, const RowNorm& row_norm) const {
    if (p.I == 0) return;
    if constexpr (kNarrow) {
      if (by_rows) return static_cast<void>(by_rows->template accumulate<Steps::backward>(steps, n, n + 1, false));
    }
    AccumulateArgs<T> pass = steps.pass(n);
    if (plan.row_norm_apart && !pass.unweighted) pass.norm = row_norm(n);
    general_accumulate(pass);
  }

  gpu::Memory memory_;
};

// Whether a gradient pass has anything to write: du, dweight or dvotes, or dlogits.
inline bool wants_gradient(const Problem& p, const BackwardOutputs& out) {
  return p.I > 0 && (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr);
}

// Runs the gradient pass and adds up its partial sums. The samples are cut into `parts`, each with a sum of dweight and
// dlogits. The input capsules are cut into `blocks`; if the weight is shared, each block has a sum of dweight. args has
// all inputs; this function adds the outputs.
template <class T, class Args, class Pass>
void gradient_pass(Call<T>& call, const BackwardOutputs& out, Args args, int64_t parts, int64_t blocks,
                   const Pass& pass) {
  const Problem& p = call.p;
  args.shared_weight = p.shared_weight;
  if (!p.votes_given) args.du = operand(out.du, {p.B, p.I, p.K});
  using Sum = std::remove_reference_t<decltype(args.dweight[0])>;
  const int64_t weights = p.votes_given || out.dweight.data == nullptr ? 0 : out.weight_rows * p.J * p.D * p.K;
  const int64_t weight_parts = parts * (p.shared_weight ? blocks : 1);
  const bool direct = weight_parts == 1 && std::is_same_v<Sum, float> && out.dweight.storage == Storage::f32;
  if (weights > 0)
    args.dweight = direct ? Global<Sum>(static_cast<Sum*>(out.dweight.data), weights)
                          : call.template scratch<Sum>(weight_parts * weights);
  const int64_t logits = out.dlogits.data != nullptr && !out.per_sample_logits ? p.I * p.J : 0;
  if (logits > 0) args.dlogits = call.template scratch<double>(parts * logits);
  if (out.per_sample_logits) args.dlogits_sample = operand(out.dlogits, {p.B, p.I, p.J});
  pass(args);
  if (weights > 0 && !direct) call.join(args.dweight, weight_parts, weights, out.dweight);
  if (logits > 0) call.join(args.dlogits, parts, logits, out.dlogits);
}

// The tile sizes and dvotes, for the general gradient kernel.
template <class T>
GradientArgs<T> gradient_args(const Problem& p, const BackwardOutputs& out) {
  GradientArgs<T> args{};
  args.outputs = GradientTile<T>::outputs_for(p.J, p.D);
  args.components = GradientTile<T>::components_for(p.D);
  if (p.votes_given) args.dvotes = operand(out.dweight, {p.B, p.I, p.J, p.D});
  return args;
}

template <class T>
void general_gradient(Call<T>& call, const BackwardOutputs& out, const GradientArgs<T>& general) {
  const GeneralPlan& plan = call.plan;
  gradient_pass(call, out, general, plan.gradient_splits, plan.gradient_blocks, [&](const GradientArgs<T>& args) {
    call.kernels().gradient(args, {{plan.gradient_blocks, plan.gradient_splits, 1}, call.context.stream()});
  });
}

}  // namespace capsfast::cuda
