// Chooses a kernel for given votes, that is for route_votes, whose input are the votes themselves. "Resident" kernels
// keep the votes of a sample in shared memory, "streaming" ones read them from device memory in every pass.
#pragma once

#include "general.h"
#include "given_layout.h"
#include "given_resident_backward.h"
#include "given_stream.h"

namespace capsfast::cuda {

struct GivenResidentKernels {
  gpu::Kernel<GivenResidentArgs> forward;
  gpu::Kernel<GivenResidentBackwardArgs> backward;
};

struct GivenStreamKernels {
  gpu::Kernel<GivenReduceArgs> forward, backward;
  gpu::Kernel<GivenFinalArgs> final;
};

// Each type has files given_<type>.cu and given_resident_<type>.cu, so that these compile in parallel. numbers: of a
// vote that a thread has, GivenSize::few or many.
template <class E>
GivenResidentKernels given_resident_kernels(Exchange exchange, int numbers);
template <class E>
GivenStreamKernels given_stream_kernels(Exchange exchange);

#define CAPSFAST_GIVEN(E)                                                                \
  extern template GivenResidentKernels given_resident_kernels<E>(Exchange, int numbers); \
  extern template GivenStreamKernels given_stream_kernels<E>(Exchange);
CAPSFAST_GIVEN(float)
CAPSFAST_GIVEN(BFloat16)
CAPSFAST_GIVEN(Float16)
#undef CAPSFAST_GIVEN

}  // namespace capsfast::cuda
