// The kernels for votes, that is for route_votes, whose input are the votes themselves.
#pragma once

#include "backward.h"

namespace capsfast::cuda {

struct VotesKernels {
  gpu::Kernel<VotesForwardArgs> forward;
  gpu::Kernel<VotesBackwardArgs> backward;
};

template <class Traits>
VotesKernels kernels_with() {
  return {votes_forward_kernel<Traits>, votes_backward_kernel<Traits>};
}

// Each type has a file instantiations/<type>.cu, so that types compile in parallel. elements: of a vote that a
// thread has, VotesSize::few or many.
template <class E>
VotesKernels votes_kernels(Exchange exchange, int elements) {
  constexpr int kFew = VotesSize::few, kMany = VotesSize::many;
  if (exchange == Exchange::warp) return kernels_with<VotesTraits<E, kMany, Exchange::warp>>();
  if (exchange == Exchange::block) return kernels_with<VotesTraits<E, kFew, Exchange::block>>();
  return elements == kMany ? kernels_with<VotesTraits<E, kMany, Exchange::none>>()
                           : kernels_with<VotesTraits<E, kFew, Exchange::none>>();
}

extern template VotesKernels votes_kernels<float>(Exchange, int);
extern template VotesKernels votes_kernels<BFloat16>(Exchange, int);
extern template VotesKernels votes_kernels<Float16>(Exchange, int);

}  // namespace capsfast::cuda
