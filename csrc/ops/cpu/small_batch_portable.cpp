// The kernels of a small batch, for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "small_batch.inl"
