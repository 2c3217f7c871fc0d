// Tiles and grids of the general kernels, with the reason beside each number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../params.h"

namespace capsfast::cuda {

// How many blocks a multiprocessor must hold. Few, so that a thread has enough registers not to spill.
template <class T>
constexpr int kBlocksFor = sizeof(T) == 8 ? 2 : 3;

// A tile of the accumulating pass.
template <class T>
struct AccumulateTile {
  static constexpr int samples = 8;                         // a weight is read once for so many
  static constexpr int inputs = 8;                          // so many votes are added in T, then in double
  static constexpr int outputs = sizeof(T) == 8 ? 32 : 64;  // logits and dc take 32 KiB
  static constexpr int pairs = samples * inputs;
};

// A tile of the backward's gradient pass.
template <class T>
struct GradientTile {
  static constexpr int samples = 8;
  static constexpr int inputs = 2;  // few, so that there are more blocks
  static constexpr int outputs = sizeof(T) == 8 ? 32 : 64;
  static constexpr int rows = sizeof(T) == 8 ? 128 : 256;  // (j, d) of votes: their gradients take 16 KiB
  static constexpr int columns = 64;                       // components k of u at a time
  static constexpr int pairs = samples * inputs;

  // How many output capsules a tile has, and how many of their components.
  static int64_t outputs_for(int64_t J, int64_t D) {
    return std::clamp<int64_t>(rows / std::max<int64_t>(D, 1), 1, std::min<int64_t>(std::max<int64_t>(J, 1), outputs));
  }
  static int64_t components_for(int64_t D) { return std::clamp<int64_t>(D, 1, rows); }
};

struct GeneralPlan {
  int64_t tiles;            // parts of the samples, in the accumulating passes
  int64_t splits;           // parts of the input capsules, in the accumulating passes
  int64_t out_tiles;        // parts of the output capsules, in the accumulating passes
  int64_t gradient_blocks;  // parts of the input capsules, in the gradient pass
  int64_t gradient_splits;  // parts of the samples, in the gradient pass
  // Whether the softmax over the output capsules takes a sweep of its own (row_norm_kernel), as a tile does not hold
  // them all.
  bool row_norm_apart;           // in the accumulating passes of forward and backward
  bool gradient_row_norm_apart;  // in the gradient pass
};

// So many blocks hide latencies. With more splits there would only be more partial sums.
constexpr int64_t kBlocksPerMultiprocessor = 4;

template <class T>
GeneralPlan plan_general(const Problem& p, int64_t multiprocessors) {
  using Accumulate = AccumulateTile<T>;
  using Gradient = GradientTile<T>;
  const int64_t wanted = kBlocksPerMultiprocessor * multiprocessors;
  GeneralPlan plan;
  plan.tiles = divide_up(p.B, Accumulate::samples);
  plan.out_tiles = std::max<int64_t>(1, divide_up(p.J, Accumulate::outputs));
  plan.row_norm_apart = !p.softmax_in() && plan.out_tiles > 1;
  const int64_t chunks = divide_up(p.I, Accumulate::inputs), others = std::max<int64_t>(1, plan.tiles * plan.out_tiles);
  plan.splits = std::clamp<int64_t>(divide_up(wanted, others), std::min<int64_t>(1, chunks), chunks);

  plan.gradient_row_norm_apart = !p.softmax_in() && Gradient::outputs_for(p.J, p.D) < p.J;
  const int64_t gradient_chunks = divide_up(p.I, Gradient::inputs);
  // With a shared weight every block has its own sum of dweight, so there are no more blocks than the device needs.
  plan.gradient_blocks = p.shared_weight ? std::min(gradient_chunks, wanted) : gradient_chunks;
  plan.gradient_splits = std::clamp<int64_t>(
      wanted / std::max<int64_t>(1, plan.gradient_blocks), 1, std::max<int64_t>(1, divide_up(p.B, Gradient::samples)));
  return plan;
}

}  // namespace capsfast::cuda
