// Ends the region that begin_target.inl began.
#if defined(__clang__)
#if defined(CAPSFAST_TARGET_AVX512) || defined(CAPSFAST_TARGET_AVX2)
#pragma clang attribute pop
#endif
#elif defined(CAPSFAST_TARGET_AVX512) || defined(CAPSFAST_TARGET_AVX2) || defined(__aarch64__)
#pragma GCC pop_options
#endif
