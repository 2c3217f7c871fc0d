#include "../rows/kernels.h"

template capsfast::cuda::rows::Kernels capsfast::cuda::rows::kernels_for<20, 1>(bool);
template capsfast::cuda::rows::Kernels capsfast::cuda::rows::kernels_for<20, 2>(bool);
