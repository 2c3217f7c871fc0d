// The CPU kernels for the compiler's default instructions (SSE2 on x86-64, NEON on AArch64).
#include <cstdint>
#include <type_traits>
#include <utility>

#include "../../cpu/isa.h"
#include "../../math/half.h"
#include "../../math/softmax.h"
#include "../../math/squash.h"
#include "passes.h"
#include "scratch.h"

namespace capsfast::portable {
constexpr int kBytes = 16;  // of a register
// How many registers the set has.
#if defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
#include "../../cpu/vec.inl"
#include "routing_kernels.inl"

template const Kernels<float>& table<float>();
template const Kernels<double>& table<double>();
}  // namespace capsfast::portable
