// The CPU kernels for the compiler's default instructions (SSE2 on x86-64, NEON on AArch64).
// Standard headers come before the target region: compiled inside, their inline functions could be
// linked into code that runs on older machines.
#include <cstdint>
#include <utility>

#include "../../cpu/isa.h"
#include "../../math/half.h"
#include "passes.h"
#include "scratch.h"

namespace capsfast::portable {
constexpr int kBytes = 16;      // a vector
constexpr int kRegisters = 16;  // vectors that registers hold
#include "../../cpu/vec.inl"
#include "routing_kernels.inl"

template const Kernels<float>& table<float>();
template const Kernels<double>& table<double>();
}  // namespace capsfast::portable
