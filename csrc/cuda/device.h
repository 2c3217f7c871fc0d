// Everything that kernels use of CUDA: indices, barriers, shuffles, memory, copies, tensor cores, launches. Kernels
// include no header of CUDA itself.
//
// With CAPSFAST_EMULATED the implementation comes from tests/emulator instead. It runs on the host and checks every
// access.
#pragma once

#if defined(CAPSFAST_EMULATED)
#include "device_host.h"
#else

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "check.h"
#include "limits.h"

#define CAPSFAST_DEVICE __device__ __forceinline__
// A function that is not inlined: it is compiled once for all kernels of a file and takes none of their registers.
#define CAPSFAST_CALLED __device__ __noinline__
// For the argument of a kernel that passes it on to such a function. Without this mark the argument would be copied.
#define CAPSFAST_IN_PLACE const __grid_constant__
// A kernel whose blocks have at most `threads` threads. The compiler leaves each thread so few registers that a
// multiprocessor can run `blocks` blocks at the same time.
#define CAPSFAST_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)

// nvcc warns that Global<const T> has a conversion to itself. The conversion is never used.
#pragma nv_diag_suppress 554

namespace capsfast::gpu {

struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

CAPSFAST_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
// The same index, read from the hardware at each call. The compiler cannot merge two calls. So between calls it keeps
// neither the index nor what is computed from it in registers.
CAPSFAST_DEVICE int reread_thread_idx() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}
CAPSFAST_DEVICE int threads() { return static_cast<int>(blockDim.x); }
CAPSFAST_DEVICE int64_t block_x() { return blockIdx.x; }
CAPSFAST_DEVICE int64_t block_y() { return blockIdx.y; }
CAPSFAST_DEVICE int64_t block_z() { return blockIdx.z; }
CAPSFAST_DEVICE int64_t blocks_x() { return gridDim.x; }
CAPSFAST_DEVICE int64_t blocks_y() { return gridDim.y; }
CAPSFAST_DEVICE int64_t blocks_z() { return gridDim.z; }
CAPSFAST_DEVICE void barrier() { __syncthreads(); }
CAPSFAST_DEVICE void warp_barrier() { __syncwarp(); }
// A barrier of `count` threads of the block: all lanes of the warps that call it with `id`, 1 to 15 (0 is barrier()).
CAPSFAST_DEVICE void named_barrier(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

// A cluster is a number of neighbouring blocks along x. They run at the same time and can read each other's shared
// memory. Before architecture 9.0 every block is a cluster of one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define CAPSFAST_CLUSTERS 1
#endif
// Whether the code may copy asynchronously and multiply on tensor cores. If not, kernels that need this are empty; the
// host asks architecture() before it launches one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kTensorCores = false;
#else
constexpr bool kTensorCores = true;
#endif
CAPSFAST_DEVICE int cluster_size() {
#ifdef CAPSFAST_CLUSTERS
  return static_cast<int>(__clusterSizeInBlocks());
#else
  return 1;
#endif
}
CAPSFAST_DEVICE int cluster_rank() {
#ifdef CAPSFAST_CLUSTERS
  return static_cast<int>(__clusterRelativeBlockRank());
#else
  return 0;
#endif
}
// A barrier of all threads of the cluster. A block must pass it before it exits if another block may still read its
// shared memory.
CAPSFAST_DEVICE void cluster_barrier() {
#ifdef CAPSFAST_CLUSTERS
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
#else
  __syncthreads();
#endif
}

template <class T>
CAPSFAST_DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}

// Whether `value` is true in any lane of the warp.
CAPSFAST_DEVICE bool any(bool value) { return __any_sync(0xFFFFFFFFu, value) != 0; }

// 1 / x with an error of an ulp, if neither x nor 1 / x is subnormal.
CAPSFAST_DEVICE float reciprocal(float x) {
  float to;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(to) : "f"(x));
  return to;
}

// 2^x with an error of two ulp; 0 where that is subnormal.
CAPSFAST_DEVICE float exp2(float x) {
  float to;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(to) : "f"(x));
  return to;
}

// Elements in device memory. The counts in this interface are for the emulator, which checks every index.
template <class T>
class Global {
 public:
  Global() = default;
  __host__ __device__ Global(T* data, int64_t) : data_(data) {}
  CAPSFAST_DEVICE T& operator[](int64_t n) const { return global()[n]; }
  template <class Vector>
  CAPSFAST_DEVICE Vector vector(int64_t n) const {
    return *reinterpret_cast<const Vector*>(global() + n);
  }
  // The same, past the L1 cache, for elements that are read once: they push nothing else out of it.
  template <class Vector>
  CAPSFAST_DEVICE Vector vector_once(int64_t n) const {
    static_assert(sizeof(Vector) == 4 || sizeof(Vector) == 8 || sizeof(Vector) == 16);
    using Bits =
        std::conditional_t<sizeof(Vector) == 4, unsigned, std::conditional_t<sizeof(Vector) == 8, uint2, uint4>>;
    const Bits bits = __ldcg(reinterpret_cast<const Bits*>(global() + n));
    return *reinterpret_cast<const Vector*>(&bits);
  }
  __host__ __device__ explicit operator bool() const { return data_ != nullptr; }
  CAPSFAST_DEVICE bool aligned(size_t bytes) const { return reinterpret_cast<uintptr_t>(data_) % bytes == 0; }
  // The same memory as elements of another type.
  template <class U>
  __host__ __device__ Global<U> as() const {
    return {reinterpret_cast<U*>(data_), 0};
  }
  // `count` elements from `offset` on.
  __host__ __device__ Global from(int64_t offset, int64_t count) const {
    return {data_ == nullptr ? nullptr : data_ + offset, count};
  }
  __host__ __device__ operator Global<const T>() const { return {data_, 0}; }
  // The same memory, though the compiler does not know that: it loads anew, instead of keeping in registers what it has
  // loaded before.
  CAPSFAST_DEVICE Global reread() const {
    size_t address = __cvta_generic_to_global(data_);
    asm volatile("" : "+l"(address));
    return {static_cast<T*>(__cvta_global_to_generic(address)), 0};
  }

 private:
  // If a kernel chooses between pointers, the compiler no longer knows what kind of memory they point to. Then it emits
  // generic accesses, which find out at run time.
  CAPSFAST_DEVICE T* global() const {
    __builtin_assume(__isGlobal(data_));
    return data_;
  }
  T* data_ = nullptr;
};

// Elements in the block's shared memory.
template <class T>
class Shared {
 public:
  CAPSFAST_DEVICE explicit Shared(T* data) : data_(data) {}
  CAPSFAST_DEVICE T& operator[](int n) const { return data_[n]; }
  // Loads or stores as many elements as Vector holds at once, from n on. n is a multiple of their number.
  template <class Vector>
  CAPSFAST_DEVICE Vector vector(int n) const {
    return *reinterpret_cast<const Vector*>(data_ + n);
  }
  template <class Vector>
  CAPSFAST_DEVICE void write(int n, const Vector& value) const {
    *reinterpret_cast<Vector*>(data_ + n) = value;
  }
  // Element n of the same memory in block `rank` of the cluster.
  CAPSFAST_DEVICE T read_from(int rank, int n) const {
#ifdef CAPSFAST_CLUSTERS
    return *static_cast<T*>(__cluster_map_shared_rank(data_ + n, static_cast<unsigned>(rank)));
#else
    return data_[n];
#endif
  }
  CAPSFAST_DEVICE T* data() const { return data_; }

 private:
  T* data_;
};

// `count` elements of the block's shared memory from byte `offset` on.
template <class T>
CAPSFAST_DEVICE Shared<T> shared(int offset, int /*count*/) {
  extern __shared__ __align__(16) unsigned char capsfast_shared[];
  return Shared<T>(reinterpret_cast<T*>(capsfast_shared + offset));
}

// The nearest TF32 number (10 bits of mantissa).
CAPSFAST_DEVICE float to_tf32(float x) {
  uint32_t bits;
#ifdef CAPSFAST_CLUSTERS
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
  return __uint_as_float(bits);
}

// The same, except that a NaN may become a number. So it takes two instructions and not four, also before architecture
// 9.0.
CAPSFAST_DEVICE float to_tf32_or_number(float x) {
#ifdef CAPSFAST_CLUSTERS
  return to_tf32(x);
#else
  return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xFFFFE000u);
#endif
}

// c [16, 8] += a [16, 8] b [8, 8]. Each lane of the warp has 4, 4 and 2 of their elements, in the fragment layout of
// PTX's mma.m16n8k8.
CAPSFAST_DEVICE void mma_tf32(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// c = a b, as above. The sum begins with a register that is always 0, which saves setting c.
CAPSFAST_DEVICE void mma_tf32_from_zero(float (&c)[4], const float (&a)[4], const float (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])), "f"(0.0f));
}

// c [16, 8] += a [16, 8] b [8, 8] for 16-bit numbers, two in a register, the lower k in the low half. A lane has k = 2
// quad and 2 quad + 1 of row `group` (a[0]) and of row group + 8 (a[1]) of a, the same k of column `group` of b, and of
// c what it has for mma_tf32(). Here group = lane / 4, quad = lane % 4.
CAPSFAST_DEVICE void mma_bf16(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}
CAPSFAST_DEVICE void mma_f16(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// c = a b, as above; see mma_tf32_from_zero().
CAPSFAST_DEVICE void mma_bf16_from_zero(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b), "f"(0.0f));
}
CAPSFAST_DEVICE void mma_f16_from_zero(float (&c)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
               : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(b), "f"(0.0f));
}

// Starts copying 16 bytes from device memory to shared memory, without registers on the way. Both addresses are
// multiples of 16. The copying thread may read the bytes after copies_wait(), other threads after a barrier that
// follows. copies_commit() ends a group of copies; copies_wait_but_last() does not wait for the last group that ended.
template <class T>
CAPSFAST_DEVICE void copy_ahead(Shared<T> to, int at, Global<const T> from, int64_t n) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to.data() + at))),
               "l"(__cvta_generic_to_global(&from[n]))
               : "memory");
}
CAPSFAST_DEVICE void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
CAPSFAST_DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
CAPSFAST_DEVICE void copies_wait_but_last() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

// Bulk copies, from architecture 9.0 on: one thread copies any multiple of 16 bytes, between addresses that are
// multiples of 16. An Arrival, 8 bytes of shared memory, counts their bytes. For each use of the Arrival one thread
// says how many bytes to expect. Then every thread that reads the bytes waits; odd is false in uses 0, 2, 4 and so on.
// One thread begins the Arrival before its first use and ends it after its last use, with barriers between. Before
// architecture 9.0 an Arrival does nothing, so a kernel must ask has_bulk_copies().
CAPSFAST_DEVICE constexpr bool has_bulk_copies() {
#ifdef CAPSFAST_CLUSTERS
  return true;
#else
  return false;
#endif
}
class Arrival {
 public:
  CAPSFAST_DEVICE explicit Arrival(int offset) : at_(address(shared<unsigned char>(offset, 8))) {}
  CAPSFAST_DEVICE void begin() const {
    if constexpr (has_bulk_copies())
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(at_)
                   : "memory");
  }
  CAPSFAST_DEVICE void end() const {
    if constexpr (has_bulk_copies()) asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at_) : "memory");
  }
  CAPSFAST_DEVICE void expect(int bytes) const {
    if constexpr (has_bulk_copies())
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at_), "r"(bytes) : "memory");
  }
  CAPSFAST_DEVICE void copy(Shared<unsigned char> to, Global<const unsigned char> from, int64_t n, int bytes) const {
    if constexpr (has_bulk_copies())
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)),
          "l"(__cvta_generic_to_global(&from[n])), "r"(bytes), "r"(at_)
          : "memory");
  }
  CAPSFAST_DEVICE void wait(bool odd) const {
    if constexpr (has_bulk_copies())
      asm volatile(
          "{\n\t.reg .pred arrived;\n"
          "again: mbarrier.try_wait.parity.shared::cta.b64 arrived, [%0], %1;\n\t@!arrived bra again;\n\t}" ::"r"(at_),
          "r"(odd ? 1 : 0)
          : "memory");
  }
  // After the next barrier, bulk copies may overwrite what this thread has written to shared memory.
  static CAPSFAST_DEVICE void release_writes() {
    if constexpr (has_bulk_copies()) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

 private:
  static CAPSFAST_DEVICE uint32_t address(Shared<unsigned char> x) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(x.data()));
  }
  uint32_t at_;
};

// A kernel that starts early (see Together) waits here until the preceding launch has ended and its results can be
// read. Every thread must wait. Until then the kernel may not read what the preceding launch writes, nor write what
// that launch reads or writes. Before architecture 9.0 both functions do nothing.
CAPSFAST_DEVICE void wait_for_launch_before() {
#ifdef CAPSFAST_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next launch may start, if it may start early, as soon as all blocks have called this or have ended.
CAPSFAST_DEVICE void let_next_launch_start() {
#ifdef CAPSFAST_CLUSTERS
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

using Stream = void*;  // a cudaStream_t

// Sets `bytes` bytes of device memory to 0.
inline void set_zero(void* memory, int64_t bytes, Stream stream) {
  const cudaError_t code = cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream));
  check(code, "cudaMemsetAsync");
}

// Which blocks of a launch must run at the same time: clusters of `cluster` blocks along x, or, if `grid`, all blocks.
// If `early`, the launch may start before the launch before it has ended. Only a launch directly behind another launch
// of the same call may start early: other kernels of the stream may keep other rules.
struct Together {
  int cluster = 1;
  bool grid = false, early = false;
};

// The configuration of a launch, with the attributes for `together`.
class Launching {
 public:
  Launching(Grid grid, int threads, int shared_bytes, Stream stream, Together together) {
    config_.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
    config_.blockDim = dim3(static_cast<unsigned>(threads));
    config_.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config_.stream = static_cast<cudaStream_t>(stream);
    config_.attrs = attributes_;
    if (together.cluster > 1) {
      cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {static_cast<unsigned>(together.cluster), 1, 1};
    }
    if (together.grid) {
      cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeCooperative;
      attribute.val.cooperative = 1;
    }
    if (together.early) {
      cudaLaunchAttribute& attribute = attributes_[config_.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
  }
  Launching(const Launching&) = delete;
  Launching& operator=(const Launching&) = delete;
  const cudaLaunchConfig_t& config() const { return config_; }

 private:
  cudaLaunchAttribute attributes_[3] = {};
  cudaLaunchConfig_t config_ = {};
};

// Launches the kernel and checks for errors, without waiting for the kernel. False if all blocks must run at the same
// time and the driver refuses this. The device may have less room than it reports, for example if processes share it.
template <class Args>
[[nodiscard]] bool try_launch(Kernel<Args> kernel, Grid grid, int threads, int shared_bytes, Stream stream,
                              const Args& args, Together together) {
  if (shared_bytes > 0) limits().of(kernel);  // sets how much the kernel may ask for
  // Code of an older architecture must not start early: its wait_for_launch_before() does nothing, also on a newer
  // device.
  if (together.early) together.early = limits().of(kernel).architecture >= 90;
  const Launching launching(grid, threads, shared_bytes, stream, together);
  const cudaError_t code = cudaLaunchKernelEx(&launching.config(), kernel, args);
  // A driver without cooperative launches of clusters may call the attributes invalid.
  const bool refused =
      code == cudaErrorCooperativeLaunchTooLarge || code == cudaErrorNotSupported ||
      (together.cluster > 1 && (code == cudaErrorInvalidConfiguration || code == cudaErrorInvalidValue));
  if (together.grid && refused) {
    static_cast<void>(cudaGetLastError());  // clears the error, or a later check would report it
    return false;
  }
  check(code, "a kernel launch");
  return true;
}

template <class Args>
void launch(Kernel<Args> kernel, Grid grid, int threads, int shared_bytes, Stream stream, const Args& args,
            Together together = {}) {
  if (!try_launch(kernel, grid, threads, shared_bytes, stream, args, together))
    check(cudaErrorCooperativeLaunchTooLarge, "a kernel launch");
}

inline int Driver::device() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

inline Driver::Known Driver::known(const void* kernel) {
  cudaFuncAttributes found{};
  check(cudaFuncGetAttributes(&found, kernel), "cudaFuncGetAttributes");
  int bytes = 0;  // of a block
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device()), "cudaDeviceGetAttribute");
  return {bytes - static_cast<int>(found.sharedSizeBytes), found.ptxVersion};
}

inline void Driver::allow_shared(const void* kernel, int bytes) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
}

inline void Driver::prefer_shared(const void* kernel, int bytes) {
  int most = 0;
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device()), "cudaDeviceGetAttribute");
  constexpr int kReserved = 1024;  // of each block
  const int percent = static_cast<int>((100LL * (bytes + kReserved) + most - 1) / most);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, percent), "cudaFuncSetAttribute");
}

inline int64_t Driver::max_active_blocks(const void* kernel, int threads, int shared_bytes) {
  int blocks = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<size_t>(shared_bytes)),
        "an occupancy query");
  return blocks;
}

inline int64_t Driver::max_active_clusters(const void* kernel, int size, int threads, int shared_bytes) {
  if (known(kernel).architecture < 90) return 0;
  const Launching launching({size, 1, 1}, threads, shared_bytes, nullptr, {size, false});
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launching.config()), "an occupancy query");
  return clusters;
}

}  // namespace capsfast::gpu

#endif
