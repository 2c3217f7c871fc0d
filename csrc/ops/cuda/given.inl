// The kernels for given votes of one element type; included by given_resident_<type>.cu.
#include "given.h"

namespace capsfast::cuda {

template <class Tr>
GivenResidentKernels resident_kernels() {
  return {given_resident_kernel<Tr>, given_resident_backward_kernel<Tr>};
}

template <class E>
GivenResidentKernels given_resident_kernels(Exchange exchange, int numbers) {
  constexpr int kFew = GivenSize::few, kMany = GivenSize::many;
  if (exchange == Exchange::warp) return resident_kernels<GivenTraits<E, kMany, Exchange::warp>>();
  if (exchange == Exchange::block) return resident_kernels<GivenTraits<E, kFew, Exchange::block>>();
  return numbers == kMany ? resident_kernels<GivenTraits<E, kMany, Exchange::none>>()
                          : resident_kernels<GivenTraits<E, kFew, Exchange::none>>();
}

}  // namespace capsfast::cuda
