#include "../general/kernels.h"
#include "../votes/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<BFloat16>(bool);
template votes::Kernels votes::kernels_for<BFloat16>(int64_t);

}  // namespace capsfast::cuda
