// The CPU kernels for AVX2 with FMA.
#include "../../cpu/isa.h"
#include "../../cpu/kernel.h"
#include "kernel.h"

#if CAPSFAST_X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace capsfast::avx2 {
constexpr int kBytes = 32;      // of a register
constexpr int kTileBytes = 64;  // of a vector of a tile of samples
constexpr int kRegisters = 16;  // how many the set has
#include "routing_kernels.inl"
}  // namespace capsfast::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // CAPSFAST_X86
