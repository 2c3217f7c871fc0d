// The CPU kernels for the compiler's default instructions (SSE2 on x86-64, NEON on AArch64).
#if defined(__aarch64__) && !defined(__clang__)
// GCC otherwise moves loads so far ahead of the multiply-adds that the sums of a block no longer fit the registers.
#pragma GCC optimize("no-schedule-insns")
#endif

#include "../../cpu/isa.h"
#include "../../cpu/kernel.h"
#include "kernel.h"

namespace capsfast::portable {
constexpr int kBytes = 16;  // of a register
// How many registers the set has, and the bytes of a vector of a tile of samples.
#if defined(__aarch64__)
constexpr int kRegisters = 32;
constexpr int kTileBytes = 64;
#else
constexpr int kRegisters = 16;
constexpr int kTileBytes = 16;
#endif
#include "routing_kernels.inl"
}  // namespace capsfast::portable
