#include "../rows/kernels.h"

template capsfast::cuda::rows::Kernels capsfast::cuda::rows::kernels_for<12, 1>(bool);
template capsfast::cuda::rows::Kernels capsfast::cuda::rows::kernels_for<24, 1>(bool);
