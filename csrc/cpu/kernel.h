// What the kernels build on. The .inl files are compiled once for each instruction set, inside a namespace and a target
// region of that set (ops/cpu/routing_avx2.cpp). Headers come before the region. Inside it their inline functions would
// be compiled for the set, and the linker could choose that copy for code that runs on older machines.
#pragma once

// A file that compiles kernels includes isa.h first. Without it an editor has opened an .inl alone, and reads it as a
// portable kernel.
#ifndef CAPSFAST_INLINE
#define CAPSFAST_OPENED_ALONE
#endif

#include <cstdint>
#include <type_traits>
#include <utility>

#include "isa.h"

#if CAPSFAST_X86
#include <immintrin.h>
#endif

#ifdef CAPSFAST_OPENED_ALONE
namespace capsfast {}
using namespace capsfast;
constexpr int kBytes = 16, kTileBytes = 16, kRegisters = 16;
#endif
