#include "../rows/kernels.inl"

namespace capsfast::cuda::rows {

template Kernels plain_kernels<20, 2, true>();
template Kernels plain_kernels<20, 2, false>();

}  // namespace capsfast::cuda::rows
