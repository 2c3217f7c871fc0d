// Which kernels of the rows family there are. Each line of the table has a file in ../instantiations, so that these
// compile in parallel.
#pragma once

#include "gradient.h"

namespace capsfast::cuda::rows {

struct Kernels {
  gpu::Kernel<AccumulateArgs<false>> forward;
  gpu::Kernel<AccumulateArgs<true>> backward;
  gpu::Kernel<GradientArgs> gradient;
  // Bytes of shared memory of a block.
  int (*accumulate_bytes)(const Inputs&, const Shape&);
  int (*gradient_bytes)(const Inputs&, const Shape&, bool with_dlogits);
};

// Sizes: the accumulators are registers, so their number is a constant. 24 tiles take 96 registers for votes and as many
// for their sum; more do not fit. Calls with options, and those of 12 output capsules with K above 8, are rare and get
// by with two sizes and with exact products, which numbers of 16 bits take as well.
//
//   tiles  steps             share of padding (of D = 16, K = 8 or 16) at J = 1 ... 12
//                             1    2    3    4    5    6    7    8    9   10   11   12
//     12     1   plain       83 % 67   50   33   17    0
//     20     1   all         90   80   70   60   50   40   30   20   10    0
//     20     2   plain       90   80   70   60   50   40   30   20   10    0
//     24     1   plain                                                          8    0
//     24     2   any, in                                                        8    0
struct Choice {
  int tiles, steps;
  bool exact;
  Options options;
};

template <int kTiles, int kSteps, bool kExact>
Kernels plain_kernels();
template <int kTiles, int kSteps>
Kernels kernels_with_options(bool in);

extern template Kernels plain_kernels<12, 1, true>();
extern template Kernels plain_kernels<12, 1, false>();
extern template Kernels plain_kernels<20, 1, true>();
extern template Kernels plain_kernels<20, 1, false>();
extern template Kernels plain_kernels<20, 2, true>();
extern template Kernels plain_kernels<20, 2, false>();
extern template Kernels plain_kernels<24, 1, true>();
extern template Kernels plain_kernels<24, 1, false>();
extern template Kernels kernels_with_options<20, 1>(bool);
extern template Kernels kernels_with_options<24, 2>(bool);

}  // namespace capsfast::cuda::rows
