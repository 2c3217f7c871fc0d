// The table of kernels, and the kernels of the lanes layout, for AVX-512 (F, BW, DQ, VL).
#define CAPSFAST_TARGET_AVX512
#include "kernel_table.inl"
