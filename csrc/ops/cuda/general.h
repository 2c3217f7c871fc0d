// The general kernels: any J, D and K, every option, every type.
#pragma once

#include "final.h"
#include "general_plan.h"
#include "reduce.h"

namespace capsfast::cuda {

struct Launch {
  gpu::Grid grid;
  gpu::Stream stream;
};

template <class T>
struct GeneralKernels {
  void (*reduce)(const ReduceArgs<T>&, const Launch&);
  void (*rows)(const RowsArgs<T>&, const Launch&);
  void (*final)(const FinalArgs<T>&, const Launch&);
};

// For inputs of type E; votes: they are given. One file general_<type>.cu each, so that they compile side by side.
template <class E>
const GeneralKernels<typename WideOf<E>::type>& general_kernels(bool votes);

extern template const GeneralKernels<float>& general_kernels<float>(bool);
extern template const GeneralKernels<double>& general_kernels<double>(bool);
extern template const GeneralKernels<float>& general_kernels<BFloat16>(bool);
extern template const GeneralKernels<float>& general_kernels<Float16>(bool);

}  // namespace capsfast::cuda
