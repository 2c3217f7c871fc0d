// The kernels of the rows layout for AVX2 with FMA.
#define CAPSFAST_TARGET_AVX2
#include "rows_kernels.inl"
