#include "../rows/kernels.h"

namespace capsfast::cuda::rows {

template Kernels plain_kernels<12, 1, true>();
template Kernels plain_kernels<12, 1, false>();
template Kernels plain_kernels<24, 1, true>();
template Kernels plain_kernels<24, 1, false>();

}  // namespace capsfast::cuda::rows
