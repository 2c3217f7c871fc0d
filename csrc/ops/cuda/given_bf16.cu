#include "given.inl"

namespace capsfast::cuda {

template GivenStreamKernels given_stream_kernels<BFloat16>(Exchange);

}  // namespace capsfast::cuda
