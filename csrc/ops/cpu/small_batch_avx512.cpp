// The kernels of a small batch, for AVX-512 (F, BW, DQ, VL).
#define CAPSFAST_TARGET_AVX512
#include "small_batch.inl"
