#include "../general/kernels.h"

namespace capsfast::cuda {

template const GeneralKernels<double>& general_kernels<double>(bool);

}  // namespace capsfast::cuda
