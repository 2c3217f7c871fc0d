// The kernels of the rows layout: turns the sizes of a call into template constants.
#pragma once

#include "../../cpu/kernel.h"
#include "scratch.h"

#if CAPSFAST_HAS_TARGET
#include "../../cpu/begin_target.inl"
#include "../../cpu/vec.inl"
#include "keys.inl"
#include "rows.inl"
#include "rows_accumulate.inl"
#include "rows_gradient.inl"

namespace capsfast::CAPSFAST_TARGET {

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

template <class T>
RowsKernels<T> rows_kernels() {
  return {rows_run<RowsAccumulate, T, AccumulatePass<T>>, rows_run<RowsGradient, T, GradientPass<T>>};
}

template RowsKernels<float> rows_kernels<float>();
template RowsKernels<double> rows_kernels<double>();

}  // namespace capsfast::CAPSFAST_TARGET

#include "../../cpu/end_target.inl"
#endif
