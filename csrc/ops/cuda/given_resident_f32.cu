#include "given.inl"

namespace capsfast::cuda {

template GivenResidentKernels given_resident_kernels<float>(Exchange, int);

}  // namespace capsfast::cuda
