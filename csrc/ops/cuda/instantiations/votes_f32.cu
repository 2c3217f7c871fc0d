#include "../votes/kernels.inl"

namespace capsfast::cuda {

template VotesKernels votes_kernels<float>(Exchange, int);

}  // namespace capsfast::cuda
