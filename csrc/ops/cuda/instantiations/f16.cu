#include "../general/kernels.h"
#include "../votes/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<Float16>(bool);
template votes::Kernels votes::kernels_for<Float16>(int64_t);

}  // namespace capsfast::cuda
