// The CPU kernels for AVX2 with FMA.
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
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace capsfast::avx2 {
constexpr int kBytes = 32;      // of a register
constexpr int kRegisters = 16;  // how many the set has
#include "../../cpu/vec.inl"
#include "routing_kernels.inl"

template const Kernels<float>& table<float>();
template const Kernels<double>& table<double>();
}  // namespace capsfast::avx2

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif  // CAPSFAST_X86
