#include "../rows/kernels.h"

template capsfast::cuda::rows::Kernels capsfast::cuda::rows::kernels_with_options<20, 1>(bool);
