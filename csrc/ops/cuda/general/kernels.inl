// Launchers of the general kernels of one element type; included by ../instantiations/general_<type>.cu.
#include "kernels.h"

namespace capsfast::cuda {

template <class T, class E, bool kVotes>
GeneralKernels<T> launchers() {
  return {
      [](const AccumulateArgs<T>& args, const Launch& at) {
        gpu::launch(accumulate_kernel<T, E, kVotes>, at.grid, kThreads, AccumulateShared<T>::bytes, at.stream, args);
      },
      [](const RowNormArgs<T>& args, const Launch& at) {
        gpu::launch(row_norm_kernel<T, E, kVotes>, at.grid, kThreads, AccumulateShared<T>::bytes, at.stream, args);
      },
      [](const GradientArgs<T>& args, const Launch& at) {
        gpu::launch(gradient_kernel<T, E, kVotes>, at.grid, kThreads, GradientShared<T>::bytes, at.stream, args);
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
