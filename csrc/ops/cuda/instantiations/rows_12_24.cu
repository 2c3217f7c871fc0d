#include "../../../cuda/grid.h"
#include "../rows/kernels.h"

namespace capsfast::cuda::rows {

template Kernels plain_kernels<12, 1>(bool);
template Kernels plain_kernels<24, 1>(bool);

}  // namespace capsfast::cuda::rows
