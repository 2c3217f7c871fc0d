// The kernels of routing without votes, for AVX2 with FMA.
#define CAPSFAST_TARGET_AVX2
#include "factored.inl"
