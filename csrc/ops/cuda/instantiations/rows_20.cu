#include "../rows/kernels.h"

template capsfast::cuda::rows::Kernels capsfast::cuda::rows::plain_kernels<20, 1>(bool);
template capsfast::cuda::rows::Kernels capsfast::cuda::rows::plain_kernels<20, 2>(bool);
