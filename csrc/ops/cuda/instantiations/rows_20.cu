#include "../rows/kernels.h"

namespace capsfast::cuda::rows {

template Kernels plain_kernels<20, 1, true>();
template Kernels plain_kernels<20, 1, false>();
template Kernels plain_kernels<20, 2, true>();
template Kernels plain_kernels<20, 2, false>();

}  // namespace capsfast::cuda::rows
