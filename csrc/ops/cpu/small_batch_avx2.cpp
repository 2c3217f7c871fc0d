// The kernels of a small batch, for AVX2 with FMA.
#define CAPSFAST_TARGET_AVX2
#include "small_batch.inl"
