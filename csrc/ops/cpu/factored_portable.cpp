// The kernels of routing without votes, for the compiler's default instructions.
#define CAPSFAST_TARGET_PORTABLE
#include "factored.inl"
