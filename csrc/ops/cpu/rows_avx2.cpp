// The kernels of the rows layout for AVX2 with FMA.
#define CAPSFAST_TARGET_AVX2
#include "../../cpu/kernel.h"
#include "scratch.h"

#if CAPSFAST_X86
#include "../../cpu/begin_target.inl"
#include "rows_kernels.inl"
#include "../../cpu/end_target.inl"
#endif
