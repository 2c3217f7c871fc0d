// Chooses a kernel for given votes, that is for route_votes, whose input are the votes themselves.
#pragma once

#include "given_resident_backward.h"

namespace capsfast::cuda {

struct GivenResidentKernels {
  gpu::Kernel<GivenResidentArgs> forward;
  gpu::Kernel<GivenResidentBackwardArgs> backward;
};

// Each type has a file given_resident_<type>.cu, so that types compile in parallel. numbers: of a vote that a thread has,
// GivenSize::few or many.
template <class E>
GivenResidentKernels given_resident_kernels(Exchange exchange, int numbers);

extern template GivenResidentKernels given_resident_kernels<float>(Exchange, int);
extern template GivenResidentKernels given_resident_kernels<BFloat16>(Exchange, int);
extern template GivenResidentKernels given_resident_kernels<Float16>(Exchange, int);

}  // namespace capsfast::cuda
