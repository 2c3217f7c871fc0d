// The kernels for votes, that is for route_votes, whose input are the votes themselves.
#pragma once

#include "backward.h"

namespace capsfast::cuda {

struct VotesKernels {
  gpu::Kernel<VotesForwardArgs> forward;
  gpu::Kernel<VotesBackwardArgs> backward;
};

// Each type has a file instantiations/votes_<type>.cu, so that types compile in parallel. elements: of a vote that a
// thread has, VotesSize::few or many.
template <class E>
VotesKernels votes_kernels(Exchange exchange, int elements);

extern template VotesKernels votes_kernels<float>(Exchange, int);
extern template VotesKernels votes_kernels<BFloat16>(Exchange, int);
extern template VotesKernels votes_kernels<Float16>(Exchange, int);

}  // namespace capsfast::cuda
