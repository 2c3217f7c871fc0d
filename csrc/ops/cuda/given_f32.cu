#include "given.inl"

namespace capsfast::cuda {

template GivenStreamKernels given_stream_kernels<float>(Exchange);

}  // namespace capsfast::cuda
