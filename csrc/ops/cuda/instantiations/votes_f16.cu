#include "../votes/kernels.inl"

namespace capsfast::cuda {

template VotesKernels votes_kernels<Float16>(Exchange, int);

}  // namespace capsfast::cuda
