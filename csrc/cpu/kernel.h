// What the kernels build on. An .inl file of kernels is compiled once for each instruction set: into the namespace
// capsfast::CAPSFAST_TARGET of the set, and in a target region (begin_target.inl). Headers come before the region.
// Inside the region their inline functions would be compiled for the set, and the linker could choose that copy for
// code that runs on older machines.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "../math/half.h"
#include "../math/softmax.h"
#include "isa.h"

#if CAPSFAST_X86
#include <immintrin.h>
#endif

// CAPSFAST_HAS_TARGET: whether the compiler's machine has the set. kBytes: of a register. kRegisters: how many the set
// has. kTileBytes: of a vector of a tile of samples.
#if defined(CAPSFAST_TARGET_AVX512)
#define CAPSFAST_TARGET avx512
#define CAPSFAST_HAS_TARGET CAPSFAST_X86
namespace capsfast::avx512 {
constexpr int kBytes = 64, kRegisters = 32, kTileBytes = 64;
}
#elif defined(CAPSFAST_TARGET_AVX2)
#define CAPSFAST_TARGET avx2
#define CAPSFAST_HAS_TARGET CAPSFAST_X86
namespace capsfast::avx2 {
constexpr int kBytes = 32, kRegisters = 16, kTileBytes = 64;
}
#else
// The compiler's default instructions: SSE2 on x86-64, NEON on AArch64. `driver` is the namespace of gather.inl in the
// driver, and of any .inl file that an editor has opened alone.
#define CAPSFAST_HAS_TARGET 1
#if defined(CAPSFAST_TARGET_PORTABLE)
#define CAPSFAST_TARGET portable
#else
#define CAPSFAST_TARGET driver
#endif
namespace capsfast::CAPSFAST_TARGET {
#if defined(__aarch64__)
constexpr int kBytes = 16, kRegisters = 32, kTileBytes = 64;
#else
constexpr int kBytes = 16, kRegisters = 16, kTileBytes = 16;
#endif
}  // namespace capsfast::CAPSFAST_TARGET
#endif
