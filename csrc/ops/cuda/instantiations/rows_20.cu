#include "../../../cuda/grid.h"
#include "../rows/kernels.h"

namespace capsfast::cuda::rows {

template Kernels plain_kernels<20, 1>(bool);
template Kernels plain_kernels<20, 2>(bool);

}  // namespace capsfast::cuda::rows
