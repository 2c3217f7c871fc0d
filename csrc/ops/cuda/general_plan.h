// Tiles and grids of the general kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"

namespace capsfast::cuda {

constexpr int kThreads = 128;
// Blocks a multiprocessor must hold: leaves a thread the registers it needs not to spill.
template <class T>
constexpr int kBlocksFor = sizeof(T) == 8 ? 2 : 3;

// A tile of the reducing pass.
template <class T>
struct ReduceTile {
  static constexpr int samples = 8;                         // a weight that was read serves this many
  static constexpr int inputs = 8;                          // summed in T before they join a sum in double
  static constexpr int outputs = sizeof(T) == 8 ? 32 : 64;  // logits and dc then fill 32 KiB
  static constexpr int pairs = samples * inputs;
};

// A tile of the backward's last pass.
template <class T>
struct FinalTile {
  static constexpr int samples = 8;
  static constexpr int inputs = 2;  // more blocks: each owns its input capsules
  static constexpr int outputs = sizeof(T) == 8 ? 32 : 64;
  static constexpr int rows = sizeof(T) == 8 ? 128 : 256;  // of votes, 16 KiB of their gradients
  static constexpr int columns = 64;                       // components of u at a time
  static constexpr int pairs = samples * inputs;

  // Output capsules and their components at a time.
  static int64_t outputs_for(int64_t J, int64_t D) {
    return std::clamp<int64_t>(rows / std::max<int64_t>(D, 1), 1, std::min<int64_t>(std::max<int64_t>(J, 1), outputs));
  }
  static int64_t components_for(int64_t D) { return std::clamp<int64_t>(D, 1, rows); }
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct GeneralPlan {
  int64_t tiles;         // of samples
  int64_t splits;        // of the input capsules, in the reducing pass
  int64_t out_tiles;     // of output capsules, in the reducing pass
  int64_t final_blocks;  // along the input capsules
  int64_t final_splits;  // of the samples
  bool rows_apart;       // the softmax over the output capsules takes a sweep of its own, in the forward
  bool final_rows_apart;
};

// A few blocks a multiprocessor hide latencies; more splits would only add partial sums.
constexpr int64_t kBlocksPerMultiprocessor = 4;

template <class T>
GeneralPlan plan_general(const Problem& p, int64_t multiprocessors) {
  using R = ReduceTile<T>;
  using F = FinalTile<T>;
  const int64_t wanted = kBlocksPerMultiprocessor * multiprocessors;
  GeneralPlan plan;
  plan.tiles = divide_up(p.B, R::samples);
  plan.out_tiles = std::max<int64_t>(1, divide_up(p.J, R::outputs));
  plan.rows_apart = !p.softmax_in && plan.out_tiles > 1;
  const int64_t chunks = divide_up(p.I, R::inputs), others = std::max<int64_t>(1, plan.tiles * plan.out_tiles);
  plan.splits = std::clamp<int64_t>(divide_up(wanted, others), std::min<int64_t>(1, chunks), chunks);

  plan.final_rows_apart = !p.softmax_in && F::outputs_for(p.J, p.D) < p.J;
  const int64_t final_chunks = divide_up(p.I, F::inputs);
  // With a shared weight every block sums up a gradient of its own, so there are no more than are wanted.
  plan.final_blocks = p.shared_weight ? std::min(final_chunks, wanted) : final_chunks;
  plan.final_splits = std::clamp<int64_t>(
      wanted / std::max<int64_t>(1, plan.final_blocks), 1, std::max<int64_t>(1, divide_up(p.B, F::samples)));
  return plan;
}

}  // namespace capsfast::cuda
