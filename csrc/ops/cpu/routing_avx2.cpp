// The table of kernels, and the kernels of the lanes layout, for AVX2 with FMA.
#define CAPSFAST_TARGET_AVX2
#include "kernel_table.inl"
