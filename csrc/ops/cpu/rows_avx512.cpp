// The kernels of the rows layout for AVX-512 (F, BW, DQ, VL).
#define CAPSFAST_TARGET_AVX512
#include "rows_kernels.inl"
