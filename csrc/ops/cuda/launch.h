// What forward and backward share: arguments of kernels, scratch memory, launches.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <optional>
#include <type_traits>
#include <utility>

#include "../../cuda/context.h"
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

template <class T>
class Call {
 public:
  // with_coupling: see rows::why_not().
  Call(const Problem& problem, const Tensor& like, bool backward, bool with_coupling)
      : p(problem),
        context(like),
        in(inputs_of(problem)),
        plan(plan_general<T>(problem, context.multiprocessors)),
        squash{problem.squash, operand(problem.bias, {problem.J, problem.D})} {
    if constexpr (kNarrow) {
      if (rows::why_not(problem, with_coupling, gpu::limits().of(join_kernel<float>).architecture) == nullptr)
        by_rows.emplace(p, in, backward, context);
    }
  }

  // Calls describe(), which takes() all scratch memory of this call, twice: without memory, to add up what it takes, and
  // with it. So torch's allocator is asked once. If scratch_apart(), each part asks the allocator.
  template <class F>
  void with_scratch(const F& describe) {
    describe();
    if (gpu::scratch_apart()) return;
    held_ = std::exchange(taken_, 0);
    memory_ = context.scratch(held_);
    describe();
    STD_TORCH_CHECK(taken_ == held_, "capsfast: ", taken_, " bytes of scratch memory taken, ", held_, " described");
  }
  // Uninitialised or zeroed memory that is released with this object.
  template <class N>
  Global<N> take(int64_t count, bool zeroed = false) {
    constexpr int64_t kAlignment = 256;
    const int64_t bytes = count * static_cast<int64_t>(sizeof(N));
    unsigned char* at = gpu::scratch_apart() ? context.scratch(bytes) : memory_ == nullptr ? nullptr : memory_ + taken_;
    taken_ += divide_up(bytes, kAlignment) * kAlignment;
    STD_TORCH_CHECK(memory_ == nullptr || taken_ <= held_, "capsfast: scratch memory taken that was not described");
    if (at != nullptr && zeroed) gpu::set_zero(at, bytes, context.stream);
    return {reinterpret_cast<N*>(at), count};
  }

  // The order of V and ds, and memory for `count` arrays in this order. Padding must be 0.
  VectorOrder order() const { return by_rows ? by_rows->order() : VectorOrder{p.J, p.D, 0}; }
  Global<T> take_vectors(int64_t count) {
    const VectorOrder of = order();
    return take<T>(count * of.size(p.B), of.padded(p.B));
  }

  // Memory for the partial sums of a pass, if there is any. with_columns: also for the maxima and totals of the softmax
  // over the input capsules.
  Parts<T> take_parts(bool with_columns, bool any = true) {
    Parts<T> to{};
    to.work = by_rows ? by_rows->work() : Work{p.I, p.B, 1, plan.splits};
    const int64_t rows = to.work.segments() * to.work.group * p.J;
    if (!any) return to;
    if (by_rows) {
      to.sum_rows = take<float>(rows * p.D);
    } else {
      to.sum = take<double>(rows * (p.D + p.moments));
    }
    if (with_columns) {
      to.max = take<T>(rows);
      to.total = take<double>(rows);
    }
    return to;
  }

  // Memory for `count` normalisers [B, I] of the softmax over the output capsules, which a sweep of its own computes.
  void take_row_norms(int64_t count) {
    const int64_t size = count * p.B * p.I;
    if (count > 0) row_norms_ = {take<T>(size), take<T>(size), take<T>(size)};
  }
  Normaliser<T> row_norms() const { return {row_norms_.max, row_norms_.scale, row_norms_.mean}; }
  // Computes normaliser n, for tiles that do not hold all output capsules.
  Normaliser<T> row_norm(const Scoring<T>& scoring, int64_t n) const {
    const int64_t count = p.B * p.I;
    const auto part = [&](const Global<T>& all) { return all.from(n * count, count); };
    const RowNormArgs<T> args{in, scoring, part(row_norms_.max), part(row_norms_.scale), part(row_norms_.mean)};
    if (p.I > 0)
      launch(kernels().row_norm, {divide_up(p.I, AccumulateTile<T>::inputs), grid_rows(plan.tiles), 1},
             kernels().accumulate_bytes, args);
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
    bool direct;                  // the only part of dweight is dweight itself
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
    if (of->logits > 0) of->args.dlogits = take<double>(of->parts * of->logits);
    if (weights > 0 && by_rows) of->args.dweight_rows = take<float>(weights);
    if (weights > 0 && !by_rows) of->args.dweight = take<double>(weights);
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
  const gpu::Context context;
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
    launch(
        kernels().accumulate, {plan.out_tiles, grid_rows(plan.tiles), plan.splits}, kernels().accumulate_bytes, pass);
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
  unsigned char* memory_ = nullptr;  // of the scratch tensor
  int64_t held_ = 0, taken_ = 0;     // bytes
};

// Whether a gradient pass has anything to write: du, dweight or dvotes, or dlogits.
inline bool wants_gradient(const Problem& p, const BackwardOutputs& out) {
  return p.I > 0 && (out.du.data != nullptr || out.dweight.data != nullptr || out.dlogits.data != nullptr);
}

}  // namespace capsfast::cuda
