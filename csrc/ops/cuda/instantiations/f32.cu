#include "../general/kernels.h"
#include "../votes/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<float>(bool);
template votes::Kernels votes::kernels_for<float>(int64_t);

}  // namespace capsfast::cuda
