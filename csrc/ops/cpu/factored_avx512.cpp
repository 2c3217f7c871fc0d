// The kernels of routing without votes for AVX-512 (F, BW, DQ, VL).
#define CAPSFAST_TARGET_AVX512
#include "../../cpu/kernel.h"
#include "factored_kernels.h"

#if CAPSFAST_X86
#include "../../cpu/begin_target.inl"
#include "factored.inl"
#include "../../cpu/end_target.inl"
#endif
