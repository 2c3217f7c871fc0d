// The table of kernels, and the kernels of the lanes layout, for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "../../cpu/kernel.h"
#include "scratch.h"

#include "../../cpu/begin_target.inl"
#include "kernel_table.inl"
#include "../../cpu/end_target.inl"
