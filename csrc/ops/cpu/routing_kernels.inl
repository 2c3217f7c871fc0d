// The table of kernels of one instruction set: run-time sizes to template constants.
// Included once per instruction set, inside its namespace and target region.

#include "coupling.inl"
#include "gather.inl"
#include "lanes.inl"
#include "lanes_final.inl"
#include "lanes_reduce.inl"
#include "rows.inl"
#include "rows_final.inl"
#include "rows_reduce.inl"

// Calls Pass<T, K>::run with K a constant for the common poses.
template <template <class, int> class Pass, class T, class Arguments>
void lanes_run(const Arguments& pass, const Range& range, T* scratch) {
  if constexpr (sizeof(T) == 4) {
    switch (pass.problem->K) {
      case 4: return Pass<T, 4>::run(pass, range, scratch);
      case 8: return Pass<T, 8>::run(pass, range, scratch);
      case 16: return Pass<T, 16>::run(pass, range, scratch);
    }
  }
  Pass<T, 0>::run(pass, range, scratch);
}

// Calls Pass<T, L, NV, kind>::run for L lanes.
template <template <class, int, int, Pose> class Pass, class T, int L, class Arguments>
void rows_run_lanes(const Arguments& pass, const Range& range, T* scratch) {
  const Problem& p = *pass.problem;
  const int64_t M = p.D * p.K;
  if (p.votes_given) {
    if (M == L) return Pass<T, L, 1, Pose::none>::run(pass, range, scratch);
    return Pass<T, L, 0, Pose::none>::run(pass, range, scratch);
  }
  if constexpr (L == kLanes<T>) {
    if (p.K > 0 && L % p.K == 0) {
      if (M == 8 * L) return Pass<T, L, 8, Pose::one_register>::run(pass, range, scratch);
      return Pass<T, L, 0, Pose::one_register>::run(pass, range, scratch);
    }
  }
  Pass<T, L, 0, Pose::repeated>::run(pass, range, scratch);
}

// Full registers for long rows, parts of one for short ones.
template <template <class, int, int, Pose> class Pass, class T, class Arguments>
void rows_run(const Arguments& pass, const Range& range, T* scratch) {
  constexpr int L = kLanes<T>;
  if (pass.plan->L == L) return rows_run_lanes<Pass, T, L>(pass, range, scratch);
  if constexpr (L >= 4) {
    if (pass.plan->L == L / 2) return rows_run_lanes<Pass, T, L / 2>(pass, range, scratch);
  }
  if constexpr (L >= 8) {
    if (pass.plan->L == L / 4) return rows_run_lanes<Pass, T, L / 4>(pass, range, scratch);
  }
}

template <class T>
const Kernels<T>& table() {
  static const Kernels<T> kernels{kLanes<T>, lanes_run<LanesReduce, T, ReducePass<T>>, lanes_run<LanesFinal, T, FinalPass<T>>,
                                  rows_run<RowsReduce, T, ReducePass<T>>, rows_run<RowsFinal, T, FinalPass<T>>};
  return kernels;
}
