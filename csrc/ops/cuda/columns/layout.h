// How the columns family cuts votes: the canonical numbers, and who owns what.
//
//   canonical layer: B = 128, I = 1152, J = 10, D = 16, K = 8
//   strip        16 samples: the rows of a product. 8 strips
//   column       (j, d) of the votes, D padded to 16, 32 or 64. 160 columns
//   tile         8 columns: one product mma.m16n8k8 and four accumulators of a lane
//   span         16 columns, neighbours in the weight
//   column warp  10 tiles = 5 output capsules of 16 components, or 8 tiles = 4 of 16, 2 of 32, 1 of 64. 2 column warps
//   turn         a strip and an input capsule; column warps share it. Each has its votes in registers
//   step         8 components k of a pose: one product. K is padded to 1, 2 or 4 steps
//   stage        the weights of a few input capsules in shared memory; a ring of two or three stages
//   stream       column warps that share turns. A block of threads has `strips` x `streams` of them, 16 warps in all
//   section      the output capsules of a block of threads, if one block has not all of them
//
//                     columns n = 0 .. 7 of a tile, two a lane
//                  0   1 | 2   3 | 4   5 | 6   7
//    sample 0     x0  x1 |       |       |           lane = 4 group + quad has, of each tile,
//    ...        quad = 0 |   1   |   2   |   3         x0 x1 of sample `group`, x2 x3 of sample `group` + 8
//    sample 8     x2  x3 |       |       |
//
// Column n = 2 quad + e of tile t is column 16 quad + 2 t + e of the column warp if t < 8: so a lane has 16
// neighbouring components, all of an output capsule of 16. Tiles 8 and 9 have columns 64 + 8 (t - 8) + n: four lanes
// share the fifth output capsule. A slot is an output capsule of which a lane has components: slot 0 in tiles 0 to 7,
// slot 1 in tiles 8 and 9. So a dot product over d takes few exchanges, and the weighted sum finds each coupling
// coefficient in its lane.
//
// Arrays that kernels write for each other (V, ds, partial sums) have the order of the fragments: [strips][column
// warps][tiles][32 lanes] fours {x0 x1 x2 x3}. Every access is 16 bytes a lane, 512 bytes a warp. Padding is 0.
#pragma once

#include <cstdint>

#include "../../../cuda/device.h"
#include "../tensor_cores.h"

namespace capsfast::cuda::columns {

constexpr int kStrip = 16;           // samples
constexpr int kSpan = 16;            // columns
constexpr int kStep = 8;             // components of a pose
constexpr int kWholeTiles = 8;       // tiles whose lanes have 16 neighbouring columns
constexpr int kMostColumnWarps = 8;  // that share a softmax through shared memory
constexpr int kMostStrips = 2;       // of a block of threads: V and ds stay in the L1 cache

// What a kernel is compiled for. kSteps: of a product; 0 if votes are given. kExact: splits float32 numbers into two
// TF32 parts; three TF32 products are as accurate as a float32 product. Else one product.
template <int kTiles, int kSteps, bool kExact>
struct Columns {
  static constexpr int tiles = kTiles, steps = kSteps;
  static constexpr bool given = kSteps == 0, exact = kExact;
  static constexpr int columns = 8 * kTiles, spans = columns / kSpan;
  static constexpr int slots = kTiles > kWholeTiles ? 2 : 1;
  static constexpr int components = kSteps * kStep;        // of a pose, with padding
  static constexpr int most_warps = kSteps > 2 ? 12 : 16;  // of a block: 168 or 128 registers a thread
  static constexpr int vectors = kTiles * 128;  // numbers of a strip and a column warp in the order of the fragments
  // Coupling coefficients and their gradients of a turn and a column warp, as stored: {c, c, db, db} of each lane's
  // slot 0 and its two samples, then {c, db} of slot 1 of each sample.
  static constexpr int pairs = 128 + (slots - 1) * 2 * kStrip;
  static_assert(kTiles == 8 || kTiles == 10);
};

// How many lanes share an output capsule in slot 0, of D components; the logarithm of this number to base 2; and the
// output capsules of a column warp.
CAPSFAST_HOST_DEVICE constexpr int lanes_of(int64_t D) { return D <= 16 ? 1 : D <= 32 ? 2 : 4; }
CAPSFAST_HOST_DEVICE constexpr int log_of_lanes(int lanes) { return lanes / 2; }
CAPSFAST_HOST_DEVICE constexpr int outputs_of(int tiles, int lanes) {
  return tiles > kWholeTiles ? 5 : 4 >> log_of_lanes(lanes);
}

// How a call is cut; plan.h chooses.
struct Cut {
  int warps;         // column warps of a block of threads
  int strips;        // of a block of threads
  int streams;       // groups of column warps that share a strip; each has other input capsules
  int chunk;         // input capsules of a stage, a multiple of `streams`
  int stages;        // of the ring, two or three
  int sections;      // of the output capsules: blocks of threads with `warps` column warps each
  int lanes;         // that share an output capsule in slot 0; D with padding is 16 times `lanes`
  int splits;        // of the input capsules
  int groups;        // of `strips` strips
  bool in_bulk;      // weights come by bulk copies
  bool in_pieces;    // weights, or given votes, may be copied in pieces of 16 bytes
  bool poses_whole;  // a lane may load its components of a pose at once

  CAPSFAST_HOST_DEVICE int threads() const { return 32 * warps * strips * streams; }
  CAPSFAST_HOST_DEVICE int column_warps() const { return warps * sections; }
  CAPSFAST_HOST_DEVICE int outputs(int tiles) const { return outputs_of(tiles, lanes); }
  CAPSFAST_HOST_DEVICE int lanes_log() const { return log_of_lanes(lanes); }
};

// A number for each output capsule of a lane and each of its two samples.
template <class Tr>
using Scores = float[Tr::slots][2];

// A thread's place in its block of threads: its column warp, strip and stream; its lane, and the group and quad of the
// lane in the fragment.
struct Coord {
  int warp, strip, stream, lane, group, quad;
  int column_warp;  // among the column warps of all blocks of threads
  int output;       // its first output capsule

  // strips_of_block: strips with warps of their own. section: which of `cut.sections` parts of the output capsules.
  template <class Tr>
  static CAPSFAST_DEVICE Coord of(const Cut& cut, int strips_of_block, int section) {
    const unsigned thread = static_cast<unsigned>(gpu::thread()), warps = static_cast<unsigned>(cut.warps);
    const unsigned strips = static_cast<unsigned>(strips_of_block), team = thread / 32 / warps;
    Coord at;
    at.warp = static_cast<int>(thread / 32 % warps);
    at.strip = static_cast<int>(team % strips);
    at.stream = static_cast<int>(team / strips);
    at.lane = static_cast<int>(thread % 32);
    at.group = at.lane / 4;
    at.quad = at.lane % 4;
    at.go_to<Tr>(cut, section);
    return at;
  }
  template <class Tr>
  CAPSFAST_DEVICE void go_to(const Cut& cut, int section) {
    column_warp = section * cut.warps + warp;
    output = column_warp * cut.outputs(Tr::tiles);
  }
  // The column warps of a strip and a stream.
  CAPSFAST_DEVICE int team(const Cut& cut) const { return stream * cut.strips + strip; }
  // The output capsule of a slot, and whether this lane counts it in sums over lanes.
  CAPSFAST_DEVICE int output_of(const Cut& cut, int slot) const {
    return output + (slot == 0 ? quad >> cut.lanes_log() : 4);
  }
  CAPSFAST_DEVICE bool counts(const Cut& cut, int slot, int J) const {
    return output_of(cut, slot) < J && (slot == 0 ? (quad & (cut.lanes - 1)) == 0 : quad == 0);
  }
};

// Columns of a column warp as tiles and lanes have them: see above.
CAPSFAST_HOST_DEVICE constexpr int column_of(int tile, int n) {
  return tile < kWholeTiles ? kSpan * (n / 2) + 2 * tile + n % 2 : kSpan * 4 + 8 * (tile - kWholeTiles) + n;
}

// Where part `rank` begins, if `count` things are cut into `size` equal parts.
CAPSFAST_HOST_DEVICE inline int part_of(int count, int rank, int size) {
  return static_cast<int>(static_cast<int64_t>(count) * rank / size);
}

}  // namespace capsfast::cuda::columns
