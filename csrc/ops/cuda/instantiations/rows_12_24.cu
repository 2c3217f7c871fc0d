#include "../rows/kernels.h"

template capsfast::cuda::rows::Kernels capsfast::cuda::rows::plain_kernels<12, 1>(bool);
template capsfast::cuda::rows::Kernels capsfast::cuda::rows::plain_kernels<24, 1>(bool);
