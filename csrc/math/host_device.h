// Marks functions that CPU and CUDA share.
#pragma once

#if defined(__CUDACC__)
#define CAPSFAST_HOST_DEVICE __host__ __device__
#else
#define CAPSFAST_HOST_DEVICE
#endif
