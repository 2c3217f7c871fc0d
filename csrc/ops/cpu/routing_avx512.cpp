// The CPU kernels for AVX-512 (F, BW, DQ, VL).
#include "../../cpu/isa.h"
#include "../../cpu/kernel.h"
#include "kernel.h"

#if CAPSFAST_X86
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace capsfast::avx512 {
constexpr int kBytes = 64;      // of a register
constexpr int kTileBytes = 64;  // of a vector of a tile of samples
constexpr int kRegisters = 32;  // how many the set has
#include "routing_kernels.inl"
}  // namespace capsfast::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // CAPSFAST_X86
