// Which kernels of the rows family there are. The lines of the table are spread over files in ../instantiations, so
// that they compile in parallel.
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

// Sizes: the accumulators are registers, so their number is a constant. 24 tiles take 96 registers for votes and as
// many for their sum; more do not fit. Calls with options, and those of 11 and 12 output capsules with K above 8, are
// rare and get by with few sizes and with exact products, which numbers of 16 bits take as well.
//
//                           per cent of the columns that are padding, at D = 16 and J =
//   tiles  K up to          1    2    3    4    5    6    7    8    9   10   11   12
//     12      8   plain    83   67   50   33   17    0
//     20      8   plain                                30   20   10    0
//     24      8   plain                                                    8    0
//     20     16   plain    90   80   70   60   50   40   30   20   10    0
//     20      8   options  90   80   70   60   50   40   30   20   10    0
//     24     16   options  92   83   75   67   58   50   42   33   25   17    8    0
struct Choice {
  int tiles, steps;
  bool exact;
  Options options;
};

template <class Tr>
Kernels kernels_of() {
  return {accumulate_kernel<Tr, false>, accumulate_kernel<Tr, true>, gradient_kernel<Tr>, accumulate_bytes<Tr>,
          [](const Inputs& in, const Shape& shape, bool with_dlogits) {
            return 4 * GradientMemory<Tr>(in, shape, with_dlogits).end;
          }};
}

template <int kTiles, int kSteps, bool kExact>
Kernels plain_kernels() {
  return kernels_of<Rows<kTiles, kSteps, kExact, Options::plain>>();
}

template <int kTiles, int kSteps>
Kernels kernels_with_options(bool in) {
  return in ? kernels_of<Rows<kTiles, kSteps, true, Options::in>>()
            : kernels_of<Rows<kTiles, kSteps, true, Options::any>>();
}

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
