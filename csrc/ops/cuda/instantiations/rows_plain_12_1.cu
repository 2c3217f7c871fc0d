#include "../rows/kernels.inl"

namespace capsfast::cuda::rows {

template Kernels plain_kernels<12, 1, true>();
template Kernels plain_kernels<12, 1, false>();

}  // namespace capsfast::cuda::rows
