#include "../columns/kernels.h"

template capsfast::cuda::columns::Kernels capsfast::cuda::columns::kernels_for<10, 0>(bool);
template capsfast::cuda::columns::Kernels capsfast::cuda::columns::kernels_for<10, 1>(bool);
template capsfast::cuda::columns::Kernels capsfast::cuda::columns::kernels_for<10, 2>(bool);
