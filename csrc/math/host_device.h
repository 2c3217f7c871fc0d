// CAPSFAST_HOST_DEVICE marks functions that both CPU and CUDA code call.
#pragma once

#if defined(__CUDACC__)
#define CAPSFAST_HOST_DEVICE __host__ __device__
#else
#define CAPSFAST_HOST_DEVICE
#endif
