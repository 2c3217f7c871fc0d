// The table of kernels, and the kernels of the lanes layout, for AVX-512 (F, BW, DQ, VL).
#define CAPSFAST_TARGET_AVX512
#include "../../cpu/kernel.h"
#include "scratch.h"

#if CAPSFAST_X86
#include "../../cpu/begin_target.inl"
#include "kernel_table.inl"
#include "../../cpu/end_target.inl"
#endif
