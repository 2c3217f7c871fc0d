// The kernels of the rows layout for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "../../cpu/kernel.h"
#include "scratch.h"

#include "../../cpu/begin_target.inl"
#include "rows_kernels.inl"
#include "../../cpu/end_target.inl"
