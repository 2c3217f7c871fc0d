#include "../general/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<float>& general_kernels<float>(bool);

}  // namespace capsfast::cuda
