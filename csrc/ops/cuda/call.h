// What forward and backward share: arguments as kernels take them, scratch memory, launches.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <initializer_list>
#include <type_traits>
#include <vector>

#include "../../cuda/context.h"
#include "between.h"
#include "general.h"
#include "routing.h"
#include "tiles.h"

namespace capsfast::cuda {

using torch::stable::Tensor;

// How many elements of memory a strided tensor spans, from its first to its last.
inline int64_t extent(std::initializer_list<int64_t> sizes, const int64_t* stride) {
  int64_t last = 0;
  for (const int64_t size : sizes) {
    if (size == 0) return 0;
    last += (size - 1) * *stride++;
  }
  return last + 1;
}

inline int64_t element_size(Storage storage) { return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2; }

inline Operand operand(const View& view, std::initializer_list<int64_t> sizes) {
  Operand to;
  if (view.data == nullptr) return to;
  to.data = {static_cast<unsigned char*>(view.data), extent(sizes, view.stride) * element_size(view.storage)};
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
  Call(const Problem& problem, const Tensor& like, bool backward)
      : p(problem),
        context(like),
        in(inputs_of(problem)),
        plan(plan_general<T>(problem, context.multiprocessors())),
        tiled(std::is_same_v<T, float> && why_no_tiles(problem) == nullptr),
        two(tiled && two_row_tiles(problem, context.shared_bytes())),
        tiles(tiled ? plan_tiles(problem, two, context.multiprocessors(),
                                 context.multiprocessors() * (backward ? tile_blocks<true>() : tile_blocks<false>()))
                    : TilePlan{}),
        squash{problem.squash, problem.eps, operand(problem.bias, {problem.J, problem.D})},
        like_(like) {}

  // Uninitialised memory that is released with this object. That may be before the kernels have run: the caching
  // allocator reuses memory in the order of the stream.
  template <class N>
  Global<N> scratch(int64_t count) {
    using torch::headeronly::ScalarType;
    const ScalarType type = std::is_same_v<N, double> ? ScalarType::Double : ScalarType::Float;
    // At least one element, because a null pointer is an absent argument to a kernel.
    memory_.push_back(torch::stable::new_empty(like_, {std::max<int64_t>(count, 1)}, type));
    return {static_cast<N*>(memory_.back().data_ptr()), count};
  }

  const GeneralKernels<T>& kernels() const {
    if constexpr (std::is_same_v<T, double>) {
      return general_kernels<double>(p.votes_given);
    } else {
      switch (p.votes_given ? p.votes.storage : p.u.storage) {
        case Storage::bf16:
          return general_kernels<BFloat16>(p.votes_given);
        case Storage::f16:
          return general_kernels<Float16>(p.votes_given);
        default:
          return general_kernels<float>(p.votes_given);
      }
    }
  }

  // Memory for the partial sums of a pass. with_columns: also for the maxima and totals of the softmax over the input
  // capsules.
  Parts<T> parts(bool with_columns) {
    Parts<T> to{};
    to.splits = tiled ? tiles.splits : plan.splits;
    if (tiled) {
      to.sum_tile = scratch<float>(to.splits * vectors());
    } else {
      to.sum = scratch<double>(to.splits * (vectors() + (p.moments ? scalars() : 0)));
    }
    if (with_columns) {
      to.max = scratch<T>(to.splits * scalars());
      to.total = scratch<double>(to.splits * scalars());
    }
    return to;
  }

  // Runs all passes and the steps between them in one cooperative launch. False if that cannot be: the passes do not
  // run on tensor cores, or the device does not run all their blocks at the same time. Then nothing was launched.
  template <bool kBackward, class Steps>
  bool run_together(const Steps& steps) const {
    if constexpr (std::is_same_v<T, float>) {
      if (tiled && tiles.together && tiles.splits > 0 && context.cooperative() && steps.passes() > 0) {
        return launch_tiles<kBackward>(steps, kBackward ? -1 : 0, steps.passes(), true);
      }
    }
    return false;
  }

  // Launches pass n alone. rows: the normaliser [B, I] of the softmax over the output capsules, if a tile does not hold
  // all of them.
  template <bool kBackward, class Steps>
  void reduce(const Steps& steps, int64_t n, const Normaliser<T>* rows = nullptr) const {
    if (p.I == 0) return;
    if constexpr (std::is_same_v<T, float>) {
      if (tiled) return static_cast<void>(launch_tiles<kBackward>(steps, n, n + 1, false));
    }
    ReduceArgs<T> pass = steps.pass(n);
    if (rows != nullptr) pass.norm = *rows;
    general_reduce(pass);
  }

  // By the general kernel. There are input capsules.
  void general_reduce(const ReduceArgs<T>& pass) const {
    kernels().reduce(pass, {{plan.splits, grid_rows(plan.tiles), plan.out_tiles}, context.stream()});
  }

  // Calls f(E{}, K) with the element type of u and its K, an integral constant: tile kernels are compiled for both.
  template <class F>
  auto for_tiles(const F& f) const {
    const auto of_type = [&](auto type) {
      switch (p.K) {
        case 4:
          return f(type, std::integral_constant<int, 4>());
        case 8:
          return f(type, std::integral_constant<int, 8>());
        default:
          return f(type, std::integral_constant<int, 16>());
      }
    };
    switch (p.u.storage) {
      case Storage::bf16:
        return of_type(BFloat16{});
      case Storage::f16:
        return of_type(Float16{});
      default:
        return of_type(float{});
    }
  }

  template <bool kBackward>
  TileKernel<kBackward> tile_kernel() const {
    return for_tiles([&](auto type, auto K) { return tile_kernel_for<decltype(type), K, kBackward>(p.D, two); });
  }

  template <bool kBackward>
  int64_t tile_blocks() const {
    return tile_kernel<kBackward>().blocks(static_cast<int>(p.J), p.softmax_in(), tile_threads());
  }

  template <bool kBackward, class Steps>
  bool launch_tiles(const Steps& steps, int64_t begin, int64_t end, bool together) const {
    const TilePasses<kBackward> passes{
        steps, poses_in_runs(p), p.tf32, together, static_cast<int>(begin), static_cast<int>(end)};
    return tile_kernel<kBackward>().launch(passes, tile_threads(), {{tiles.tiles, tiles.splits, 1}, context.stream()});
  }

  // Whether the last pass can run on tensor cores: shared memory must hold V and ds of `terms` iterations.
  bool tile_final_fits(int64_t terms) const {
    if (!tiled || terms > 64 || tile_threads() > 32 * TileSize::final_warps) return false;
    const int floats = for_tiles([&](auto type, auto K) {
      // The sizes do not depend on D, so any will do.
      return FinalTiles<decltype(type), K, 8>::memory(
                 static_cast<int>(p.J), tile_threads(), static_cast<int>(terms), p.softmax_in())
          .end;
    });
    return 4 * floats <= context.shared_bytes();
  }

  void tile_final(const TileFinalArgs& args) const {
    const TileFinalLauncher launcher =
        for_tiles([&](auto type, auto K) { return tile_final_launcher<decltype(type), K>(p.D); });
    launcher(args, tile_threads(), {{tiles.final_parts, tiles.final_splits, 1}, context.stream()});
  }

  // A warp has 32 columns (j, d).
  int tile_threads() const { return static_cast<int>(32 * tile_warps(p)); }

  // Computes the normaliser [B, I] of the softmax over the output capsules, if a tile does not hold all of them.
  void rows(const RowsArgs<T>& args) const {
    kernels().rows(args, {{divide_up(p.I, ReduceTile<T>::inputs), grid_rows(plan.tiles), 1}, context.stream()});
  }

  // Launches a kernel in which a warp has one output capsule of a sample at a time.
  template <class Args>
  void per_output(void (*kernel)(Args), const Args& args) const {
    if (scalars() == 0) return;
    // A warp may take several in turn, so the size of the grid can be limited.
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

  // to[n] = sum of from[k, n] over k < count, n < rows. For large `count`: several threads share a sum.
  template <class N>
  void sum_rows(const Global<N>& from, int64_t count, int64_t rows, const View& to) const {
    gpu::launch(bias_kernel<N>, {divide_up(rows, kThreads / kSumLanes), 1, 1}, kThreads, kThreads * 8, context.stream(),
                BiasArgs<N>{count, rows, from, operand(to, {rows})});
  }

  int64_t vectors() const { return p.B * p.J * p.D; }
  int64_t scalars() const { return p.B * p.J; }
  // The y axis of a grid has at most 65535 blocks. Blocks of these kernels take several tiles in turn.
  static int64_t grid_rows(int64_t tiles) { return std::clamp<int64_t>(tiles, 1, 65535); }

  const Problem& p;
  const gpu::Context context;
  const Inputs in;
  const GeneralPlan plan;
  const bool tiled;  // whether the reducing passes run on tensor cores
  const bool two;    // whether their blocks have two row tiles, 32 samples
  const TilePlan tiles;
  const Squashing squash;

 private:
  const Tensor& like_;
  std::vector<Tensor> memory_;
};

}  // namespace capsfast::cuda
