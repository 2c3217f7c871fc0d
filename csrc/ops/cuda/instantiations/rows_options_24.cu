#include "../../../cuda/grid.h"
#include "../rows/kernels.h"

namespace capsfast::cuda::rows {

template Kernels kernels_with_options<24, 2>(bool);

}  // namespace capsfast::cuda::rows
