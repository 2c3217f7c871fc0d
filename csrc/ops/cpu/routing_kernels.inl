// The table of kernels of one instruction set. Its functions turn the sizes of a call into template constants.
// Included once per instruction set, inside its namespace and target region.

#include "../../cpu/peak.inl"
#include "coupling.inl"
#include "gather.inl"
#include "lanes_packing.inl"
#include "lanes_tile.inl"
#include "lanes.inl"
#include "lanes_coefficients.inl"
#include "lanes_update.inl"
#include "lanes_products.inl"
#include "lanes_vote_gradients.inl"
#include "lanes_gradient.inl"
#include "lanes_accumulate.inl"
#include "rows.inl"
#include "rows_gradient.inl"
#include "rows_accumulate.inl"
#include "small_batch_rows.inl"
#include "small_batch_transposed.inl"
#include "small_batch.inl"
#include "shared_rows.inl"
#include "shared_routing.inl"

// Calls Pass<T, K, Q>::run. Common K are template constants; 0 stands for any other, and for all of pose matrices, of
// votes that are given and of a quadratic pass (Q), but for `quadratic`.
template <template <class, int, bool> class Pass, class T, class Arguments, int quadratic = 0>
void lanes_run(const Arguments& pass, const Range& range, T* scratch) {
  if constexpr (quadratic > 0 && sizeof(T) == 4) {
    const Problem& p = *pass.problem;
    if (p.quadratic && p.P == 1 && p.K == quadratic) return Pass<T, quadratic, true>::run(pass, range, scratch);
  }
  if (pass.problem->quadratic) return Pass<T, 0, true>::run(pass, range, scratch);
  if constexpr (sizeof(T) == 4) {
    switch (pass.problem->P == 1 ? pass.problem->K : 0) {
      case 4:
        return Pass<T, 4, false>::run(pass, range, scratch);
      case 8:
        return Pass<T, 8, false>::run(pass, range, scratch);
      case 16:
        return Pass<T, 16, false>::run(pass, range, scratch);
    }
  }
  Pass<T, 0, false>::run(pass, range, scratch);
}

// Calls Pass<T, L, NV, Q>::run, where L is the number of lanes that the plan chose: fewer than a register has for short
// votes. NV is the number of vectors of a vote if it is a constant, else 0.
template <template <class, int, int, bool> class Pass, class T, class Arguments>
void rows_run(const Arguments& pass, const Range& range, T* scratch) {
  constexpr int L = kLanes<T>;
  const int64_t D = pass.problem->D;
  const bool quadratic = pass.problem->quadratic;
  if (pass.plan->L == L) {
    if (quadratic) return Pass<T, L, 0, true>::run(pass, range, scratch);
    if (D == L) return Pass<T, L, 1, false>::run(pass, range, scratch);
    if (D == 2 * L) return Pass<T, L, 2, false>::run(pass, range, scratch);
    return Pass<T, L, 0, false>::run(pass, range, scratch);
  }
  if constexpr (L >= 4) {
    if (pass.plan->L == L / 2) {
      if (quadratic) return Pass<T, L / 2, 0, true>::run(pass, range, scratch);
      return D == L / 2 ? Pass<T, L / 2, 1, false>::run(pass, range, scratch)
                        : Pass<T, L / 2, 0, false>::run(pass, range, scratch);
    }
  }
  if constexpr (L >= 8) {
    if (quadratic) return Pass<T, L / 4, 0, true>::run(pass, range, scratch);
    return D == L / 4 ? Pass<T, L / 4, 1, false>::run(pass, range, scratch)
                      : Pass<T, L / 4, 0, false>::run(pass, range, scratch);
  }
}

template <class T>
const Kernels<T>& table() {
  static const Kernels<T> kernels{
      kLanes<T>,
      lanes_run<LanesAccumulate, T, AccumulatePass<T>, 8>,
      lanes_run<LanesGradient, T, GradientPass<T>>,
      LanesUpdate<T>::outputs,
      LanesUpdate<T>::restore,
      LanesUpdate<T>::differentiate,
      LanesPacking<T>::load_samples,
      LanesPacking<T>::store_samples,
      LanesPacking<T>::copy_weights,
      rows_run<RowsAccumulate, T, AccumulatePass<T>>,
      rows_run<RowsGradient, T, GradientPass<T>>,
      SmallBatch<T>::fold,
      SmallBatch<T>::votes,
      SmallBatch<T>::gradients,
      SharedRouting<T>::forward,
      SharedRouting<T>::backward,
      multiply_adds<T>};
  return kernels;
}
