// The kernels of a small batch, for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "../../cpu/kernel.h"
#include "scratch.h"

#include "../../cpu/begin_target.inl"
#include "small_batch.inl"
#include "../../cpu/end_target.inl"
