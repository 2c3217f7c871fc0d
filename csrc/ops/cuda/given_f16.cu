#include "given.inl"

namespace capsfast::cuda {

template GivenStreamKernels given_stream_kernels<Float16>(Exchange);

}  // namespace capsfast::cuda
