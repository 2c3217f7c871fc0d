#include "../rows/kernels.inl"

namespace capsfast::cuda::rows {

template Kernels plain_kernels<20, 1, true>();
template Kernels plain_kernels<20, 1, false>();

}  // namespace capsfast::cuda::rows
