#include "../general/kernels.h"

template const capsfast::cuda::GeneralKernels<double>& capsfast::cuda::general_kernels<double>(bool);
