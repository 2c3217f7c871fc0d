// Begins the target region of an instruction set: functions up to end_target.inl may use its instructions.
#if defined(CAPSFAST_TARGET_AVX512)
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
#elif defined(CAPSFAST_TARGET_AVX2)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#elif defined(__aarch64__) && !defined(__clang__)
#pragma GCC push_options
// GCC otherwise moves loads so far ahead of the multiply-adds that the sums of a block no longer fit the registers.
#pragma GCC optimize("no-schedule-insns")
#endif
