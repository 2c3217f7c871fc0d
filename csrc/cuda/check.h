// Turns error codes of CUDA into exceptions.
#pragma once

#include <cuda_runtime.h>
#include <torch/headeronly/util/Exception.h>

namespace capsfast::gpu {

inline void check(cudaError_t code, const char* what) {
  STD_TORCH_CHECK(code == cudaSuccess, "capsfast: ", what, " failed: ", cudaGetErrorString(code));
}

}  // namespace capsfast::gpu
