// All that device code uses of the machine: indices, barriers, shuffles, memory, tensor cores, launches.
//
// tests/emulator holds a second implementation, for the host, which checks every access: it is taken where
// CAPSFAST_EMULATED is defined. Kernels include this header and no other of CUDA.
#pragma once

#if defined(CAPSFAST_EMULATED)
#include "device_host.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

#include "check.h"

#define CAPSFAST_DEVICE __device__ __forceinline__
// At most `threads` a block, at least `blocks` of them on a multiprocessor: what registers are shared out for.
#define CAPSFAST_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)

// Global<const T> keeps the conversion that it has no use for.
#pragma nv_diag_suppress 554

namespace capsfast::gpu {

struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

CAPSFAST_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
CAPSFAST_DEVICE int threads() { return static_cast<int>(blockDim.x); }
CAPSFAST_DEVICE int64_t block_x() { return blockIdx.x; }
CAPSFAST_DEVICE int64_t block_y() { return blockIdx.y; }
CAPSFAST_DEVICE int64_t block_z() { return blockIdx.z; }
CAPSFAST_DEVICE int64_t blocks_x() { return gridDim.x; }
CAPSFAST_DEVICE int64_t blocks_y() { return gridDim.y; }
CAPSFAST_DEVICE void barrier() { __syncthreads(); }
CAPSFAST_DEVICE void warp_barrier() { __syncwarp(); }

template <class T>
CAPSFAST_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}

template <class T>
CAPSFAST_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xFFFFFFFFu, value, lane);
}

// Memory of the device. The count is for the emulator, which checks every index.
template <class T>
class Global {
 public:
  Global() = default;
  __host__ __device__ Global(T* data, int64_t) : data_(data) {}
  CAPSFAST_DEVICE T& operator[](int64_t n) const { return data_[n]; }
  template <class Vector>
  CAPSFAST_DEVICE Vector vector(int64_t n) const {
    return *reinterpret_cast<const Vector*>(data_ + n);
  }
  __host__ __device__ explicit operator bool() const { return data_ != nullptr; }
  // The same memory as elements of another type.
  template <class U>
  __host__ __device__ Global<U> as() const {
    return {reinterpret_cast<U*>(data_), 0};
  }
  // `count` elements from `offset` on.
  __host__ __device__ Global from(int64_t offset, int64_t count) const { return {data_ == nullptr ? nullptr : data_ + offset, count}; }
  __host__ __device__ operator Global<const T>() const { return {data_, 0}; }

 private:
  T* data_ = nullptr;
};

// Two neighbours, moved as one.
struct alignas(8) Pair {
  float first, second;
};

template <class T>
class Shared {
 public:
  CAPSFAST_DEVICE explicit Shared(T* data) : data_(data) {}
  CAPSFAST_DEVICE T& operator[](int n) const { return data_[n]; }
  // Elements n and n + 1, n even.
  CAPSFAST_DEVICE Pair pair(int n) const { return *reinterpret_cast<const Pair*>(data_ + n); }

 private:
  T* data_;
};

// `count` elements of the block's shared memory from byte `offset` on.
template <class T>
CAPSFAST_DEVICE Shared<T> shared(int offset, int /*count*/) {
  extern __shared__ __align__(16) unsigned char capsfast_shared[];
  return Shared<T>(reinterpret_cast<T*>(capsfast_shared + offset));
}

// The nearest number with 10 bits of mantissa, ties away from zero.
CAPSFAST_DEVICE float to_tf32(float x) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return __uint_as_float(bits);
}

// c[4] += a[16 x 8] b[8 x 8] of the warp, in the fragment layout of PTX.
CAPSFAST_DEVICE void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
                 "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

using Stream = cudaStream_t;

// Checked; nothing is waited for.
template <class Args>
void launch(void (*kernel)(Args), Grid grid, int threads, int shared_bytes, Stream stream, const Args& args) {
  if (shared_bytes > 48 * 1024) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), "cudaFuncSetAttribute");
  }
  const dim3 blocks(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  kernel<<<blocks, static_cast<unsigned>(threads), static_cast<size_t>(shared_bytes), stream>>>(args);
  check(cudaGetLastError(), "a kernel launch");
}

}  // namespace capsfast::gpu

#endif
