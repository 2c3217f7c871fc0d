#include "../../../cuda/grid.h"
#include "../rows/kernels.h"

namespace capsfast::cuda::rows {

template Kernels kernels_with_options<20, 1>(bool);

}  // namespace capsfast::cuda::rows
