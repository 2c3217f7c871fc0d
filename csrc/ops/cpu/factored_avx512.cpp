// The kernels of routing without votes, for AVX-512 (F, BW, DQ, VL).
#define CAPSFAST_TARGET_AVX512
#include "factored.inl"
