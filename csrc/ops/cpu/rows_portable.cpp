// The kernels of the rows layout for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "rows_kernels.inl"
