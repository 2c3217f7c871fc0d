// The general kernels: any J, D and K, every option, every type.
#pragma once

#include "accumulate.h"
#include "gradient.h"

namespace capsfast::cuda {

// Where a kernel is launched.
struct Launch {
  gpu::Grid grid;
  gpu::Stream stream;
};

template <class T>
struct GeneralKernels {
  void (*accumulate)(const AccumulateArgs<T>&, const Launch&);
  void (*row_norm)(const RowNormArgs<T>&, const Launch&);
  void (*gradient)(const GradientArgs<T>&, const Launch&);
};

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

// The kernels for inputs of type E. votes: for route_votes. Each type has a file in ../instantiations, so
// that types compile in parallel.
template <class E>
const GeneralKernels<typename WideOf<E>::type>& general_kernels(bool votes) {
  using T = typename WideOf<E>::type;
  static const GeneralKernels<T> made = launchers<T, E, false>(), given = launchers<T, E, true>();
  return votes ? given : made;
}

extern template const GeneralKernels<float>& general_kernels<float>(bool);
extern template const GeneralKernels<double>& general_kernels<double>(bool);
extern template const GeneralKernels<float>& general_kernels<BFloat16>(bool);
extern template const GeneralKernels<float>& general_kernels<Float16>(bool);

}  // namespace capsfast::cuda
