// The kernels of a small batch, for AVX-512 (F, BW, DQ, VL).
#define CAPSFAST_TARGET_AVX512
#include "../../cpu/kernel.h"
#include "scratch.h"

#if CAPSFAST_X86
#include "../../cpu/begin_target.inl"
#include "small_batch.inl"
#include "../../cpu/end_target.inl"
#endif
