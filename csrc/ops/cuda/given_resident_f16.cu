#include "given.inl"

namespace capsfast::cuda {

template GivenResidentKernels given_resident_kernels<Float16>(Exchange, int);

}  // namespace capsfast::cuda
