// The table of kernels of one instruction set. Its functions turn the sizes of a call into template constants. This
// file is included inside the namespace and the target region of the set.
#pragma once

#include "../../cpu/vec.inl"
#include "kernel.h"
#include "../../cpu/peak.inl"
#include "factored.inl"
#include "keys.inl"
#include "lanes_accumulate.inl"
#include "lanes_gradient.inl"
#include "lanes_packing.inl"
#include "lanes_update.inl"
#include "rows.inl"
#include "rows_accumulate.inl"
#include "rows_gradient.inl"
#include "small_batch.inl"

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

// Calls Pass<T, Rows<T, L, NV, Q>, Q>::run. The plan chose L, which is less than the lanes of a register for short
// votes. NV is the number of vectors of a vote if it is a constant, else 0.
template <template <class, class, bool> class Pass, class T, class Arguments, int L = kLanes<T>>
void rows_run(const Arguments& pass, const Range& range, T* scratch) {
  const Problem& p = *pass.problem;
  if (p.keys()) return Pass<T, Keys<T>, false>::run(pass, range, scratch);
  if constexpr (L > 2 && 4 * L > kLanes<T>) {
    if (pass.plan->L < L) return rows_run<Pass, T, Arguments, L / 2>(pass, range, scratch);
  }
  if (p.quadratic) return Pass<T, Rows<T, L, 0, true>, true>::run(pass, range, scratch);
  if (p.D == L) return Pass<T, Rows<T, L, 1, false>, false>::run(pass, range, scratch);
  if constexpr (L == kLanes<T>) {
    if (p.D == 2 * L) return Pass<T, Rows<T, L, 2, false>, false>::run(pass, range, scratch);
  }
  Pass<T, Rows<T, L, 0, false>, false>::run(pass, range, scratch);
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
      rows_run<RowsAccumulate, T, AccumulatePass<T>>,
      rows_run<RowsGradient, T, GradientPass<T>>,
      SmallBatch<T>::fold,
      SmallBatch<T>::votes,
      SmallBatch<T>::gradients,
      Factored<T>::forward,
      Factored<T>::backward,
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
