#include "../general/kernels.h"

template const capsfast::cuda::GeneralKernels<float>& capsfast::cuda::general_kernels<capsfast::cuda::Float16>(bool);
