// The instruction set is chosen at run time, so that one binary serves every x86-64 machine.
#pragma once

#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define CAPSFAST_X86 1
#else
#define CAPSFAST_X86 0
#endif

#define CAPSFAST_INLINE inline __attribute__((always_inline))
// Compiles a function once for all kernels that call it. For functions that cost far more than a call, in templates
// with many instances.
#define CAPSFAST_ONCE __attribute__((noinline))

namespace capsfast {

enum class Isa : int { portable, avx2, avx512 };

// The widest set this machine has, or a narrower one if CAPSFAST_ISA=portable|avx2|avx512 names it.
Isa isa();
const char* isa_name(Isa which);

// The kernels of an instruction set (see ops/cpu/kernels.h), with vectors of one register. tiles: the kernels for tiles
// of samples, whose vectors have as many registers as are fastest.
template <class T>
struct Kernels;
template <class T>
const Kernels<T>& kernels(Isa which, bool tiles = false);

}  // namespace capsfast
