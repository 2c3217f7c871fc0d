// The table of kernels of one instruction set. Its functions turn the sizes of a call into template constants.
#pragma once

#include "../../cpu/kernel.h"
#include "scratch.h"

#if CAPSFAST_HAS_TARGET
#include "../../cpu/begin_target.inl"
#include "../../cpu/vec.inl"
#include "lanes_accumulate.inl"
#include "lanes_gradient.inl"
#include "lanes_packing.inl"
#include "lanes_update.inl"

namespace capsfast::CAPSFAST_TARGET {

// Compiled apart: rows_kernels.inl and small_batch.inl.
template <class T>
RowsKernels<T> rows_kernels();
template <class T>
SmallBatchKernels<T> small_batch_kernels();

// Multiply-adds on registers alone: their rate bounds every kernel of this instruction set. A round is one multiply-add
// in each of 12 independent chains, which keep two units with a latency of up to 6 cycles busy.
template <class T>
T multiply_adds(int64_t rounds) {
  constexpr int kChains = 12;
  using V = Vec<T, kLanes<T>>;
  V chain[kChains];
  for (int n = 0; n < kChains; ++n) chain[n] = broadcast<kLanes<T>>(static_cast<T>(n));
  const V factor = broadcast<kLanes<T>>(static_cast<T>(0.5)), term = broadcast<kLanes<T>>(static_cast<T>(1));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int n = 0; n < kChains; ++n) chain[n] = chain[n] * factor + term;
  }
  V total = V{};
  for (int n = 0; n < kChains; ++n) total += chain[n];
  return sum<T, kLanes<T>>(total);
}

// Calls Pass<T, L, K, Q>::run. Common K are template constants; 0 stands for any other K, for pose matrices, for given
// votes and for a quadratic pass (Q), except K = `quadratic`.
template <template <class, int, int, bool> class Pass, class T, int L, class Arguments, int quadratic = 0>
void lanes_run(const Arguments& pass, const Range& range, T* scratch) {
  if constexpr (quadratic > 0 && sizeof(T) == 4) {
    const Problem& p = *pass.problem;
    if (p.quadratic && p.P == 1 && p.K == quadratic) return Pass<T, L, quadratic, true>::run(pass, range, scratch);
  }
  if (pass.problem->quadratic) return Pass<T, L, 0, true>::run(pass, range, scratch);
  if constexpr (sizeof(T) == 4) {
    switch (pass.problem->P == 1 ? pass.problem->K : 0) {
      case 4:
        return Pass<T, L, 4, false>::run(pass, range, scratch);
      case 8:
        return Pass<T, L, 8, false>::run(pass, range, scratch);
      case 16:
        return Pass<T, L, 16, false>::run(pass, range, scratch);
    }
  }
  Pass<T, L, 0, false>::run(pass, range, scratch);
}

template <class T, int L>
TileKernels<T> tile_kernels_of() {
  using Packing = LanesPacking<T, L>;
  using Tiles = LanesUpdate<T, L>;
  return {Packing::load_samples, Packing::store_samples, Tiles::outputs, Tiles::restore, Tiles::differentiate};
}

// The kernels whose vectors in tiles have L lanes: the lanes of a register, or kTileLanes.
template <class T, int L>
const Kernels<T>& table_of() {
  static const Kernels<T> kernels{
      L,
      lanes_run<LanesAccumulate, T, L, AccumulatePass<T>, 8>,
      lanes_run<LanesGradient, T, L, GradientPass<T>>,
      tile_kernels_of<T, L>(),
      tile_kernels_of<T, 1>(),
      LanesPacking<T>::copy_weights,
      rows_kernels<T>(),
      small_batch_kernels<T>(),
      multiply_adds<T>};
  return kernels;
}

// The kernels with vectors of one register or, for tiles of samples, of as many registers as are fastest.
template <class T>
const Kernels<T>& table(bool tiles) {
  return tiles ? table_of<T, kTileLanes<T>>() : table_of<T, kLanes<T>>();
}

template const Kernels<float>& table<float>(bool);
template const Kernels<double>& table<double>(bool);

}  // namespace capsfast::CAPSFAST_TARGET

#include "../../cpu/end_target.inl"
#endif
