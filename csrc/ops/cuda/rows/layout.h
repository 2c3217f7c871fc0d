// How a warp of the rows family holds the votes of 16 samples and one input capsule: all columns (j, d), in the
// accumulators of PTX's mma.m16n8k8, eight columns a tile.
//
//                     columns n = 0 .. 7 of a tile, two a lane
//                  0   1 | 2   3 | 4   5 | 6   7
//    sample 0     x0  x1 |       |       |           lane = 4 group + quad has, of each tile,
//    ...        quad = 0 |   1   |   2   |   3         x0 x1 of sample `group`, x2 x3 of sample `group` + 8
//    sample 8     x2  x3 |       |       |
//
// A lane has every component of its output capsules; component_of() in params.h says how.
// Four output capsules take a group of eight tiles: tile t of group G has, at n = 2 quad + e, component d = 2 t + e of
// capsule j = 4 G + quad. A rest of two output capsules takes four tiles, where two lanes share a capsule: j = 4 G +
// quad / 2, d = 4 t + 2 (quad % 2) + e. So dot products over d need no exchange (or one shuffle between two lanes), the
// weighted sum finds each coupling in its lane, and the softmax over j takes two shuffles. Every other capsule has its
// tiles swapped (t ^ 1), and every other two capsules their components (e ^ 1): then lanes that read a weight at the
// same time read different banks, although the weight lies as in memory.
//
// A lane of quad q has 2 steps neighbouring components k of a pose or a weight, from k = 2 steps q on: products may
// take their k in any order, and the lane loads its operands of all steps at once.
#pragma once

#include <cstdint>

#include "../../../cuda/device.h"
#include "../tensor_cores.h"

namespace capsfast::cuda::rows {

constexpr int kSamples = 16;     // of a warp: its strip
constexpr int kStep = 8;         // components k of a pose that one product takes; K is padded to whole steps
constexpr int kMostD = 16;       // components d of a vote, with padding
constexpr int kMostCluster = 4;  // blocks that add up their sums; more would not fit all GPCs
// Strips of a block in the gradient pass: V and ds of three iterations, 100 KiB, then stay in the L1 cache beside the
// block's shared memory.
constexpr int kMostGradientStrips = 2;
constexpr int kMostWarps = 8;  // of a block: 255 registers a thread leave a multiprocessor no more

// What a kernel is compiled for. kTiles: tiles of votes. kSteps: steps of a product, for K up to 8 kSteps. kExact:
// splits float32 numbers into two TF32 parts; three TF32 products are as accurate as a float32 product. Else one
// product.
template <int kTiles, int kSteps, bool kExact>
struct Rows {
  static constexpr int tiles = kTiles, steps = kSteps;
  static constexpr bool exact = kExact;
  static constexpr int groups = kTiles / 8;  // of four output capsules
  static constexpr bool paired = kTiles % 8 != 0;
  static constexpr int slots = groups + (paired ? 1 : 0);  // output capsules of a lane, for each of its two samples
  static constexpr int outputs = kTiles / 2;               // output capsules with padding
  static constexpr int parts = kExact ? 2 : 1, pairs = kTiles / 2;
  static_assert(kTiles % 8 == 0 || kTiles % 8 == 4);

  // A weight in shared memory: [outputs][kMostD][components], as in memory but with padding; see ColumnPlace.
  static constexpr int components = kSteps * kStep, weight = outputs * kMostD * components;
  // Vectors of a strip such as V in memory: [pairs][even, odd columns][32 lanes][samples group, group + 8][2 tiles].
  static constexpr int vectors = kTiles * 128;
};

// A thread's warp in its block, its lane, and the group and quad of the lane in the fragment.
struct ThreadCoord {
  int warp, lane, group, quad;
};

CAPSFAST_DEVICE ThreadCoord thread_coord() {
  // Unsigned, because the compiler divides unsigned numbers by a single shift.
  const unsigned thread = static_cast<unsigned>(gpu::reread_thread_idx()), lane = thread % 32;
  return {
      static_cast<int>(thread / 32), static_cast<int>(lane), static_cast<int>(lane / 4), static_cast<int>(lane % 4)};
}

// The output capsule of a slot, and whether this lane counts it in sums over lanes. Not counted: padding, and the
// second of two lanes that share a capsule.
template <class Tr>
CAPSFAST_DEVICE int output_of(const ThreadCoord& at, int slot) {
  return slot < Tr::groups ? 4 * slot + at.quad : 4 * Tr::groups + at.quad / 2;
}
template <class Tr>
CAPSFAST_DEVICE bool stands_for(const ThreadCoord& at, int slot, int J) {
  return output_of<Tr>(at, slot) < J && (slot < Tr::groups || at.quad % 2 == 0);
}

// Where a weight in shared memory has column n of each tile: component_of() with constants for everything that depends
// on the tile.
template <class Tr>
class ColumnPlace {
 public:
  CAPSFAST_DEVICE explicit ColumnPlace(int n) {
    const int swapped = n / 2 % 2, d = n % 2 ^ n / 4;
    const int whole = n / 2 * output + d * Tr::components;
    even_ = whole + swapped * 2 * Tr::components;
    odd_ = whole - swapped * 2 * Tr::components;
    rest_ = n / 4 * output + (2 * swapped + d) * Tr::components;
  }
  CAPSFAST_DEVICE int at(int tile) const {
    const int G = tile / 8, t = tile % 8;
    const int in_group =
        G < Tr::groups ? (t % 2 == 0 ? even_ : odd_) + 2 * t * Tr::components : rest_ + 4 * t * Tr::components;
    return 4 * G * output + in_group;
  }

 private:
  static constexpr int output = kMostD * Tr::components;
  int even_, odd_, rest_;
};

// The slots that this lane counts, as bits.
template <class Tr>
CAPSFAST_DEVICE unsigned standing(const ThreadCoord& at, int J) {
  unsigned slots = 0;
  unrolled<Tr::slots>([&](int slot) { slots |= stands_for<Tr>(at, slot, J) ? 1u << slot : 0u; });
  return slots;
}

}  // namespace capsfast::cuda::rows
