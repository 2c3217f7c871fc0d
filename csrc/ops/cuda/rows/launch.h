// How the rows family cuts a call, with the reason beside each number, and launches it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../cuda/context.h"
#include "../choose.h"
#include "kernels.h"

namespace capsfast::cuda::rows {

struct Size {
  // Blocks whose sums are one before they go to memory: more would not fit all GPCs.
  static constexpr int cluster = 4;
  // Tiles of samples of a block that accumulates, at most: a weight is read once for so many.
  static constexpr int tiles = 8;
  // And of a block in the gradient pass: V and ds of three iterations, 100 KiB, then stay in the L1 cache beside the
  // block's shared memory.
  static constexpr int gradient_tiles = 2;
  // Of dweight, each as large as the weight, where there are chunks of input capsules for all blocks.
  static constexpr int parts = 4;
  // Input capsules of a warp between two barriers, where all warps share them.
  static constexpr int chunk = 2;
};

// with_coupling: the coupling is an output or, in the backward, has a gradient, or logits have one.
inline Choice choose(const Problem& p, bool with_coupling) {
  const bool options = p.logits.data != nullptr || p.mask.data != nullptr || p.out_mask.data != nullptr || p.leaky ||
                       p.softmax_in() || with_coupling;
  if (options || (p.J > 10 && p.K > kStep)) {
    const bool small = p.J <= 10 && p.K <= kStep;
    return {small ? 20 : 24, small ? 1 : 2, true, p.softmax_in() ? Options::in : Options::any};
  }
  const bool exact = p.u.storage == Storage::f32 && !p.tf32;
  if (p.K > kStep) return {20, 2, exact, Options::plain};
  return {p.J <= 6 ? 12 : p.J <= 10 ? 20 : 24, 1, exact, Options::plain};
}

inline Kernels kernels_for(const Choice& choice) {
  const auto plain = [&](auto tiles, auto steps) {
    return choice.exact ? plain_kernels<tiles, steps, true>() : plain_kernels<tiles, steps, false>();
  };
  using One = std::integral_constant<int, 1>;
  if (choice.options != Options::plain) {
    const bool in = choice.options == Options::in;
    return choice.tiles == 20 ? kernels_with_options<20, 1>(in) : kernels_with_options<24, 2>(in);
  }
  if (choice.steps == 2) return plain(std::integral_constant<int, 20>(), std::integral_constant<int, 2>());
  if (choice.tiles == 12) return plain(std::integral_constant<int, 12>(), One());
  return choice.tiles == 20 ? plain(std::integral_constant<int, 20>(), One())
                            : plain(std::integral_constant<int, 24>(), One());
}

// Whether weights and poses may be copied in pieces of 16 bytes.
inline InPieces pieces_of(const Problem& p) {
  const int64_t size = element_bytes(p.u.storage);
  const auto whole = [&](int64_t elements) { return elements * size % 16 == 0; };
  const auto starts = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return {whole(p.J * p.D * p.K) && whole(p.weight.stride[0]) && starts(p.weight.data),
          (p.K == 1 || p.u.stride[2] == 1) && whole(p.K) && whole(p.u.stride[0]) && whole(p.u.stride[1]) &&
              starts(p.u.data)};
}

// How a block cuts its work: the largest that fits shared memory. most: tiles of samples at most.
// bytes: what a shape needs.
template <class Bytes>
Shape shape_for(int64_t tiles, int most, bool deep, int64_t shared_bytes, const Bytes& bytes) {
  Shape shape{};
  for (int warps = kMostWarps; warps > 0; warps /= 2) {
    for (int wide = std::min(most, warps); wide > 0; wide /= 2) {
      // Tiles beyond the batch cost as much as others, so they are an eighth at most.
      const int64_t padded = (tiles + wide - 1) / wide * wide;
      if (wide > 1 && 8 * padded > 9 * tiles) continue;
      shape.tiles_log = log_of(wide);
      shape.streams = warps / wide;
      shape.chunk = deep && shape.streams == 1 ? Size::chunk : shape.streams;
      if (bytes(shape) <= shared_bytes) return shape;
    }
  }
  return shape;
}

// How the passes of a forward, or those of a backward but the last, are launched.
struct AccumulatePlan {
  Shape shape;
  Work work;
  int cluster;
  bool together;  // the device runs all blocks at the same time
};

template <bool kBackward>
AccumulatePlan plan_accumulate(const Problem& p, const Inputs& in, const Kernels& kernels, const gpu::Context& on) {
  AccumulatePlan plan{};
  const int64_t tiles = (p.B + kSamples - 1) / kSamples;
  plan.shape = shape_for(tiles, Size::tiles, true, on.shared_bytes(), [&](const Shape& shape) {
    return kernels.accumulate_bytes(in, shape);
  });
  const int64_t groups = (tiles + plan.shape.tiles() - 1) / plan.shape.tiles(), pairs = groups * p.I;
  const auto most = [&](int cluster) {
    const int bytes = kernels.accumulate_bytes(in, plan.shape), threads = plan.shape.threads();
    const auto of = [&](auto kernel) {
      return cluster > 1 ? gpu::max_active_clusters(kernel, cluster, threads, bytes)
                         : gpu::max_active_blocks(kernel, threads, bytes) * on.multiprocessors();
    };
    if constexpr (kBackward) {
      return of(kernels.backward);
    } else {
      return of(kernels.forward);
    }
  };
  // Blocks of a cluster share the input capsules of a unit, so there must be enough for all.
  plan.cluster = on.clusters() && pairs >= Size::cluster * plan.shape.chunk * on.multiprocessors() ? Size::cluster : 1;
  int64_t units = most(plan.cluster);
  // An instance of a partitioned GPU may be too small for a cluster, and PTX of an older architecture has none.
  if (plan.cluster > 1 && units * plan.cluster * 8 < on.multiprocessors() * 7) {
    plan.cluster = 1;
    units = most(1);
  }
  plan.together = units > 0;
  plan.work = {p.I, plan.shape.samples(), groups, std::clamp<int64_t>(units, 1, pairs)};
  return plan;
}

struct GradientPlan {
  Shape shape;
  int64_t parts, splits;  // of the samples and of the input capsules
};

inline GradientPlan plan_gradient(const Problem& p, const Inputs& in, const Kernels& kernels, bool with_dlogits,
                                  const gpu::Context& on) {
  GradientPlan plan{};
  const int64_t tiles = (p.B + kSamples - 1) / kSamples;
  const auto bytes = [&](const Shape& shape) { return kernels.gradient_bytes(in, shape, with_dlogits); };
  plan.shape = shape_for(tiles, Size::gradient_tiles, false, on.shared_bytes(), bytes);
  const int64_t blocks =
      gpu::max_active_blocks(kernels.gradient, plan.shape.threads(), bytes(plan.shape)) * on.multiprocessors();
  const int64_t groups = (tiles + plan.shape.tiles() - 1) / plan.shape.tiles();
  const int64_t chunks = (p.I + plan.shape.chunk - 1) / plan.shape.chunk, units = std::max<int64_t>(blocks, 1);
  // The fewest rounds of a block, each a chunk for a group of samples. More parts of dweight, which are written, read
  // and added up, must save an eighth of them.
  const int64_t most = std::min<int64_t>({groups, chunks < units ? units : Size::parts, units});
  int64_t fewest = INT64_MAX;
  for (int64_t parts = 1; parts <= most; ++parts) {
    const int64_t splits = std::min<int64_t>({chunks, units / parts, 65535});
    const int64_t rounds = divide_up(groups, parts) * divide_up(chunks, splits);
    if (parts > 1 && 8 * rounds > 7 * fewest) continue;
    fewest = rounds;
    plan.parts = parts;
    plan.splits = splits;
  }
  return plan;
}

// A call: its kernels and how they are launched.
class Launcher {
 public:
  Launcher(const Problem& problem, const Inputs& inputs, bool backward, bool with_coupling, const gpu::Context& context)
      : p(problem),
        in(inputs),
        on(context),
        choice(choose(problem, with_coupling)),
        kernels(kernels_for(choice)),
        plan(backward ? plan_accumulate<true>(problem, inputs, kernels, context)
                      : plan_accumulate<false>(problem, inputs, kernels, context)) {}

  VectorOrder order() const { return {p.J, p.D, choice.tiles}; }
  const Work& work() const { return plan.work; }
  bool together() const { return plan.together && on.cooperative(); }

  // Runs passes [begin, end) of `steps`; see AccumulateArgs. False if `together` and the device refuses it. Nothing was
  // launched then.
  template <bool kBackward, class Steps>
  bool accumulate(const Steps& steps, int64_t begin, int64_t end, bool together) const {
    const AccumulateArgs<kBackward> args{
        steps, plan.work, plan.shape, pieces_of(p), together, static_cast<int>(begin), static_cast<int>(end), 0};
    const auto launch = [&](auto kernel) {
      return gpu::try_launch(kernel, {plan.work.units * plan.cluster, 1, 1}, plan.shape.threads(),
                             kernels.accumulate_bytes(in, plan.shape), on.stream(), args, {plan.cluster, together});
    };
    if constexpr (kBackward) {
      return launch(kernels.backward);
    } else {
      return launch(kernels.forward);
    }
  }

  GradientPlan plan_gradient(bool with_dlogits) const { return rows::plan_gradient(p, in, kernels, with_dlogits, on); }

  void gradient(GradientArgs args, const GradientPlan& by) const {
    args.shape = by.shape;
    args.in_pieces = pieces_of(p);
    args.scale = choice.options == Options::plain ? static_cast<float>(p.J) : 1.0f;
    args.unscale = (choice.exact ? 1.0f : kOfSingle) / args.scale;
    gpu::launch(kernels.gradient, {by.parts, by.splits, 1}, by.shape.threads(),
                kernels.gradient_bytes(in, by.shape, static_cast<bool>(args.dlogits)), on.stream(), args);
  }

 private:
  const Problem& p;
  const Inputs& in;
  const gpu::Context& on;
  const Choice choice;
  const Kernels kernels;
  const AccumulatePlan plan;
};

}  // namespace capsfast::cuda::rows
