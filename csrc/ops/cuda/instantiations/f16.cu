#include "../general/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<Float16>(bool);

}  // namespace capsfast::cuda
