// The kernels for votes of one element type; included by instantiations/votes_<type>.cu.
#include "kernels.h"

namespace capsfast::cuda {

template <class Traits>
VotesKernels kernels_with() {
  return {votes_forward_kernel<Traits>, votes_backward_kernel<Traits>};
}

template <class E>
VotesKernels votes_kernels(Exchange exchange, int elements) {
  constexpr int kFew = VotesSize::few, kMany = VotesSize::many;
  if (exchange == Exchange::warp) return kernels_with<VotesTraits<E, kMany, Exchange::warp>>();
  if (exchange == Exchange::block) return kernels_with<VotesTraits<E, kFew, Exchange::block>>();
  return elements == kMany ? kernels_with<VotesTraits<E, kMany, Exchange::none>>()
                           : kernels_with<VotesTraits<E, kFew, Exchange::none>>();
}

}  // namespace capsfast::cuda
