// The table of kernels, and the kernels of the lanes layout, for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "kernel_table.inl"
