// The kernels of routing without votes for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "../../cpu/kernel.h"
#include "factored_kernels.h"

#include "../../cpu/begin_target.inl"
#include "factored.inl"
#include "../../cpu/end_target.inl"
