// The kernels of the rows family. Files in ../instantiations have the lines of the table, so that they compile in
// parallel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "gradient.h"

namespace capsfast::cuda::rows {

struct Kernels {
  std::tuple<gpu::Kernel<AccumulateArgs<false>>, gpu::Kernel<AccumulateArgs<true>>> accumulate;  // [backward]
  gpu::Kernel<GradientArgs> gradient;
  int (*accumulate_bytes)(const Inputs&, const Shape&);
  int (*gradient_bytes)(const Inputs&, const Shape&, bool with_dlogits);
  int tiles;
  int loaded_poses;  // components of a pose that a lane loads at once
  bool exact, plain;
};

template <class Tr>
Kernels kernels_of() {
  return {{accumulate_kernel<Tr, false>, accumulate_kernel<Tr, true>},
          gradient_kernel<Tr>,
          accumulate_bytes<Tr>,
          [](const Inputs& in, const Shape& shape, bool with_dlogits) {
            return GradientMemory<Tr>(in, shape).bytes(with_dlogits);
          },
          Tr::tiles,
          Poses<Tr>::count,
          Tr::exact,
          Tr::plain};
}

template <int kTiles, int kSteps>
Kernels plain_kernels(bool exact) {
  return exact ? kernels_of<Rows<kTiles, kSteps, true, Options::plain>>()
               : kernels_of<Rows<kTiles, kSteps, false, Options::plain>>();
}

template <int kTiles, int kSteps>
Kernels kernels_with_options(bool in) {
  return in ? kernels_of<Rows<kTiles, kSteps, true, Options::in>>()
            : kernels_of<Rows<kTiles, kSteps, true, Options::any>>();
}

// Null if the rows family serves the call, else the reason why not. architecture: that the kernels were compiled for.
inline const char* why_not(const Problem& p, int architecture) {
  if (architecture < 80) return "tensor cores multiply TF32 numbers from compute capability 8.0 on";
  if (p.votes_given) return "votes are given";
  if (p.moments) return "it is a pass of its own, with mass";
  if (p.u.storage == Storage::f64) return "tensor cores multiply in 32 bits at most";
  if (p.empty()) return "there are no votes";
  if (p.K > 16) return "K is larger than 16";
  if (p.D > 16) return "D is larger than 16";
  if (p.J > 12) return "J is larger than 12";
  if (std::max(p.B, p.I) > INT32_MAX / 2 || (p.B / 16 + 1) * p.I > INT32_MAX / 2) return "B or I is too large";
  const int64_t* stride = p.weight.stride;
  const auto dense = [](int64_t length, int64_t at, int64_t wanted) { return length == 1 || at == wanted; };
  if (!dense(p.K, stride[3], 1) || !dense(p.D, stride[2], p.K) || !dense(p.J, stride[1], p.K * p.D))
    return "the weight is not contiguous";
  return nullptr;
}

extern template Kernels plain_kernels<12, 1>(bool);
extern template Kernels plain_kernels<20, 1>(bool);
extern template Kernels plain_kernels<20, 2>(bool);
extern template Kernels plain_kernels<24, 1>(bool);
extern template Kernels kernels_with_options<20, 1>(bool);
extern template Kernels kernels_with_options<24, 2>(bool);

// Sizes: the accumulators are registers, so their number is a constant. 24 tiles take 96 registers for votes and as
// many for their sum; more do not fit. Calls with options, and calls with 11 or 12 output capsules and K above 8, are
// rare. They have few sizes and exact products, also for 16-bit numbers.
//
//                           per cent of the columns that are padding, at D = 16 and J =
//   tiles  K up to          1    2    3    4    5    6    7    8    9   10   11   12
//     12      8   plain    83   67   50   33   17    0
//     20      8   plain                                30   20   10    0
//     24      8   plain                                                    8    0
//     20     16   plain    90   80   70   60   50   40   30   20   10    0
//     20      8   options  90   80   70   60   50   40   30   20   10    0
//     24     16   options  92   83   75   67   58   50   42   33   25   17    8    0
//
// with_coupling: the coupling is an output or, in the backward, has a gradient, or logits have one.
inline Kernels choose(const Problem& p, bool with_coupling) {
  const bool options = p.logits.data != nullptr || p.mask.data != nullptr || p.out_mask.data != nullptr || p.leaky ||
                       p.softmax_in() || with_coupling;
  const bool exact = p.u.storage == Storage::f32 && !p.tf32;
  if (options || (p.J > 10 && p.K > kStep))
    return p.J <= 10 && p.K <= kStep ? kernels_with_options<20, 1>(p.softmax_in())
                                     : kernels_with_options<24, 2>(p.softmax_in());
  if (p.K > kStep) return plain_kernels<20, 2>(exact);
  if (p.J <= 6) return plain_kernels<12, 1>(exact);
  return p.J <= 10 ? plain_kernels<20, 1>(exact) : plain_kernels<24, 1>(exact);
}

}  // namespace capsfast::cuda::rows
