#include "../columns/kernels.h"

template capsfast::cuda::columns::Kernels capsfast::cuda::columns::kernels_for<8, 0>(bool);
template capsfast::cuda::columns::Kernels capsfast::cuda::columns::kernels_for<8, 1>(bool);
template capsfast::cuda::columns::Kernels capsfast::cuda::columns::kernels_for<8, 2>(bool);
template capsfast::cuda::columns::Kernels capsfast::cuda::columns::kernels_for<8, 4>(bool);
