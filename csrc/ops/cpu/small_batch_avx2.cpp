// The kernels of a small batch, for AVX2 with FMA.
#define CAPSFAST_TARGET_AVX2
#include "../../cpu/kernel.h"
#include "scratch.h"

#if CAPSFAST_X86
#include "../../cpu/begin_target.inl"
#include "small_batch.inl"
#include "../../cpu/end_target.inl"
#endif
