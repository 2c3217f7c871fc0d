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
  int (*gradient_bytes)(const Inputs&, const Shape&);
  int tiles;
  int loaded_poses;  // components of a pose that a lane loads at once
  bool exact;
};

template <class Tr>
Kernels kernels_of() {
  return {{accumulate_kernel<Tr, false>, accumulate_kernel<Tr, true>},
          gradient_kernel<Tr>,
          accumulate_bytes<Tr>,
          [](const Inputs& in, const Shape& shape) { return GradientMemory<Tr>(in, shape).bytes(); },
          Tr::tiles,
          Poses<Tr>::count,
          Tr::exact};
}

template <int kTiles, int kSteps>
Kernels kernels_for(bool exact) {
  return exact ? kernels_of<Rows<kTiles, kSteps, true>>() : kernels_of<Rows<kTiles, kSteps, false>>();
}

// Null if the rows family serves the call, else the reason why not. with_coupling: the coupling is an output; in the
// backward: the coupling or the logits have a gradient. architecture: that the kernels were compiled for.
inline const char* why_not(const Problem& p, bool with_coupling, int architecture) {
  if (architecture < 80) return "tensor cores multiply TF32 numbers from compute capability 8.0 on";
  if (p.votes_given) return "votes are given";
  if (p.softmax_in() || p.leaky) return "it has softmax 'in' or a leaky entry";
  if (p.logits.data != nullptr || p.mask.data != nullptr || p.out_mask.data != nullptr)
    return "it has logits or a mask";
  if (with_coupling) return "it needs the coupling";
  if (p.moments) return "it is a pass of its own, with mass";
  if (p.u.storage == Storage::f64) return "tensor cores multiply in 32 bits at most";
  if (p.empty()) return "there are no votes";
  if (p.K > 16) return "K is larger than 16";
  if (p.D > 16) return "D is larger than 16";
  if (p.J > 12 || (p.J > 10 && p.K > kStep)) return "J is larger than 12, or than 10 with K above 8";
  if (std::max(p.B, p.I) > INT32_MAX / 2 || (p.B / 16 + 1) * p.I > INT32_MAX / 2) return "B or I is too large";
  const int64_t* stride = p.weight.stride;
  const auto dense = [](int64_t length, int64_t at, int64_t wanted) { return length == 1 || at == wanted; };
  if (!dense(p.K, stride[3], 1) || !dense(p.D, stride[2], p.K) || !dense(p.J, stride[1], p.K * p.D))
    return "the weight is not contiguous";
  return nullptr;
}

extern template Kernels kernels_for<12, 1>(bool);
extern template Kernels kernels_for<20, 1>(bool);
extern template Kernels kernels_for<20, 2>(bool);
extern template Kernels kernels_for<24, 1>(bool);

// Sizes: the accumulators are registers, so their number is a constant. 24 tiles take 96 registers for votes and as
// many for their sum; more do not fit. An option (a mask, logits, ...) takes registers too, and spills.
//
//                   per cent of the columns that are padding, at D = 16 and J =
//   tiles  K up to    1    2    3    4    5    6    7    8    9   10   11   12
//     12      8      83   67   50   33   17    0
//     20      8                                30   20   10    0
//     24      8                                                     8    0
//     20     16      90   80   70   60   50   40   30   20   10    0
inline Kernels choose(const Problem& p) {
  const bool exact = p.u.storage == Storage::f32 && !p.tf32;
  if (p.K > kStep) return kernels_for<20, 2>(exact);
  if (p.J <= 6) return kernels_for<12, 1>(exact);
  return p.J <= 10 ? kernels_for<20, 1>(exact) : kernels_for<24, 1>(exact);
}

}  // namespace capsfast::cuda::rows
