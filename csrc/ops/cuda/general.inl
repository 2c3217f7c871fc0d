// Launchers of the general kernels of one element type; included by general_<type>.cu.
#include "general.h"

namespace capsfast::cuda {

template <class T, class E, bool kVotes>
GeneralKernels<T> launchers() {
  return {
      [](const ReduceArgs<T>& args, const Launch& at) {
        gpu::launch(reduce_kernel<T, E, kVotes>, at.grid, kThreads, ReduceShared<T>::bytes, at.stream, args);
      },
      [](const RowsArgs<T>& args, const Launch& at) {
        gpu::launch(rows_kernel<T, E, kVotes>, at.grid, kThreads, ReduceShared<T>::bytes, at.stream, args);
      },
      [](const FinalArgs<T>& args, const Launch& at) {
        gpu::launch(final_kernel<T, E, kVotes>, at.grid, kThreads, FinalShared<T>::bytes, at.stream, args);
      },
  };
}

template <class E>
const GeneralKernels<typename WideOf<E>::type>& general_kernels(bool votes) {
  using T = typename WideOf<E>::type;
  static const GeneralKernels<T> made = launchers<T, E, false>(), given = launchers<T, E, true>();
  return votes ? given : made;
}

}  // namespace capsfast::cuda
