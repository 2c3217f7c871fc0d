// The kernels of the columns family. Files in ../instantiations have the lines of the table, so that they compile in
// parallel.
#pragma once

#include <cstdint>

#include "accumulate.h"
#include "gradient.h"

namespace capsfast::cuda::columns {

struct Kernels {
  gpu::Kernel<PassArgs> unweighted, pass[2][2];  // [backward][options]
  gpu::Kernel<GradientArgs> gradient;
  int (*pass_bytes)(const Inputs&, const Cut&);
  int (*gradient_bytes)(const Inputs&, const Cut&);
  int tiles, pairs, loaded_poses, most_warps;
  bool exact;
};

template <class Tr>
Kernels kernels_of() {
  constexpr Weights c = Weights::coupling, db = Weights::gradient;
  return {
      pass_kernel<Tr, Weights::none, false>,
      {{pass_kernel<Tr, c, false>, pass_kernel<Tr, c, true>}, {pass_kernel<Tr, db, false>, pass_kernel<Tr, db, true>}},
      gradient_kernel<Tr>,
      pass_bytes<Tr>,
      [](const Inputs& in, const Cut& cut) { return GradientMemory<Tr>(in, cut).bytes(); },
      Tr::tiles,
      Tr::pairs,
      2 * Tr::steps,
      Tr::most_warps,
      Tr::exact || Tr::given};
}

template <int kTiles, int kSteps>
Kernels kernels_for(bool exact) {
  if constexpr (kSteps == 0) {
    return kernels_of<Columns<kTiles, 0, false>>();  // given votes have no product, exact or not
  } else {
    return exact ? kernels_of<Columns<kTiles, kSteps, true>>() : kernels_of<Columns<kTiles, kSteps, false>>();
  }
}

extern template Kernels kernels_for<8, 0>(bool);
extern template Kernels kernels_for<8, 1>(bool);
extern template Kernels kernels_for<8, 2>(bool);
extern template Kernels kernels_for<8, 4>(bool);
extern template Kernels kernels_for<10, 0>(bool);
extern template Kernels kernels_for<10, 1>(bool);
extern template Kernels kernels_for<10, 2>(bool);

// Null if the columns family serves the call, else the reason why not. architecture: that the kernels were compiled
// for.
inline const char* why_not(const Problem& p, int architecture) {
  if (architecture < 80) return "tensor cores multiply TF32 numbers from compute capability 8.0 on";
  if (p.softmax_in()) return "it has softmax 'in'";
  if (p.moments) return "it is a pass of its own, with mass";
  const View& matrix = p.votes_given ? p.votes : p.weight;
  if (matrix.storage == Storage::f64) return "tensor cores multiply in 32 bits at most";
  if (p.empty()) return "there are no votes";
  if (p.D > 64) return "D is larger than 64";
  if (!p.votes_given && p.K > 32) return "K is larger than 32";
  constexpr int64_t kMostGrid = 65535;  // blocks along y; a block has at least one output capsule
  if (p.J > kMostGrid || p.B > INT32_MAX / 2 || p.I > INT32_MAX / 2 || p.J * p.D * p.K > INT32_MAX / 8)
    return "a size is too large";
  if (p.votes_given) return nullptr;
  const int64_t* stride = p.weight.stride;
  const auto dense = [](int64_t length, int64_t at, int64_t wanted) { return length == 1 || at == wanted; };
  if (!dense(p.K, stride[3], 1) || !dense(p.D, stride[2], p.K) || !dense(p.J, stride[1], p.K * p.D))
    return "the weight is not contiguous";
  return nullptr;
}

// Tiles of a column warp: 10 hold five output capsules of 16 components, 8 hold four, or two of 32, or one of 64. The
// number of tiles with less padding is taken. Steps of a product: K is padded to 8, 16 or 32.
//
//                             per cent of the columns that are padding, at D = 16 and J =
//   tiles       K up to    1    2    3    4    5    6    7    8    9   10   12   16   20   32
//     8 or D > 16  32     75   50   25    0        25   12    0             0    0         0
//    10            16                          0                  10    0             0
inline Kernels choose(const Problem& p) {
  const Storage storage = p.votes_given ? p.votes.storage : p.u.storage;
  const bool exact = storage == Storage::f32 && !p.tf32;
  const int64_t fives = divide_up(p.J, 5), fours = divide_up(p.J, 4);
  const bool ten = p.D <= 16 && 10 * fives < 8 * fours;
  if (p.votes_given) return ten ? kernels_for<10, 0>(false) : kernels_for<8, 0>(false);
  if (p.K > 16) return kernels_for<8, 4>(exact);
  if (p.K > 8) return ten ? kernels_for<10, 2>(exact) : kernels_for<8, 2>(exact);
  return ten ? kernels_for<10, 1>(exact) : kernels_for<8, 1>(exact);
}

}  // namespace capsfast::cuda::columns
