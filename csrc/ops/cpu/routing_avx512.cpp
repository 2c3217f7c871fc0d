// The CPU kernels for AVX-512 (F, BW, DQ, VL).
// Standard headers come before the target region. Inside it their inline functions would be compiled for this
// instruction set, and the linker could choose that copy for code that runs on older machines.
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../../cpu/isa.h"
#include "../../math/half.h"
#include "../../math/softmax.h"
#include "../../math/squash.h"
#include "passes.h"
#include "scratch.h"

#if CAPSFAST_X86
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

namespace capsfast::avx512 {
constexpr int kBytes = 64;      // of a register
constexpr int kRegisters = 32;  // how many the set has
#include "../../cpu/vec.inl"
#include "routing_kernels.inl"

template const Kernels<float>& table<float>();
template const Kernels<double>& table<double>();
}  // namespace capsfast::avx512

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // CAPSFAST_X86
