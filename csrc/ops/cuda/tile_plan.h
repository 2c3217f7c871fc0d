// The passes on tensor cores: which calls they serve, and their tiles.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"

namespace capsfast::cuda {

struct TileSize {
  static constexpr int columns = 32;     // of votes a warp: 16 registers a row tile, and as many for their sum
  static constexpr int outputs = 64;     // a row of the softmax stays within 16 numbers for each of its 4 lanes
  static constexpr int inputs = 8;       // poses staged at a time: 16 KiB at most for each of their two parts
  static constexpr int each_split = 64;  // input capsules a sum in float32 runs over, while there are splits left
  static constexpr int splits = 1024;    // partial sums of a batch of one then fill a few MiB
  // Row tiles of 16 samples a block. Two: a weight that was read serves both. One: half the registers, for batches
  // that fill no second tile and for blocks of more warps than 255 registers a thread allow.
  static constexpr int row_tiles(bool two) { return two ? 2 : 1; }
  static constexpr int warps(bool two) { return two ? 8 : 16; }
  // Of all blocks together, on a multiprocessor: 168 and 128 registers a thread, as each quarter of it has three or
  // four.
  static constexpr int resident_warps(bool two) { return two ? 12 : 16; }
  static constexpr int final_warps = 12;  // three for each quarter of a multiprocessor: 168 registers a thread
  static constexpr int final_blocks = 2;  // of the last pass a multiprocessor: its shared memory holds no more
  static constexpr int final_parts =
      4;  // of dweight, each as large as the weight: memory, against blocks to fill a device
};

// Numbers of one input capsule's poses: input capsules start in different banks.
CAPSFAST_HOST_DEVICE constexpr int tile_pose_pitch(int samples, int K) { return samples * K + 4; }

// Scores [j][row]: the four lanes of a row that take j, j + 1, j + 2, j + 3 are in different banks; two of them share
// one with 16 rows, where gaps would cost the memory of long vectors.
CAPSFAST_HOST_DEVICE constexpr int tile_score_pitch(int samples) { return samples == 32 ? 40 : samples; }

// Shared memory of the reducing pass: V and ds, poses in two parts, two buffers of scores each or, for the softmax over
// the input capsules, one of weights and three numbers of each column.
CAPSFAST_HOST_DEVICE constexpr int tile_bytes(int warps, int samples, int J, int K, bool parted, bool backward,
                                              bool softmax_in) {
  return 4 * (warps * TileSize::columns * samples * (backward ? 2 : 1) +
              TileSize::inputs * tile_pose_pitch(samples, K) * (parted ? 2 : 1) +
              J * tile_score_pitch(samples) * (backward || softmax_in ? 4 : 2));
}

// The word at fault, or null: the tile kernels serve the call.
inline const char* why_no_tiles(const Problem& p) {
  if (p.votes_given) return "votes are given";
  if (p.u.storage == Storage::f64) return "tensor cores multiply in 32 bits at most";
  if (p.K != 4 && p.K != 8 && p.K != 16) return "K is not 4, 8 or 16";
  if (p.D != 8 && p.D != 16 && p.D != 32) return "D is not 8, 16 or 32";
  if (std::max(p.B, p.I) > INT32_MAX - 32) return "B or I is too large";
  if (p.J > TileSize::outputs || p.J * p.D > TileSize::columns * TileSize::warps(false))
    return "J or J times D is too large";
  const int64_t* stride = p.weight.stride;
  const bool run = stride[3] == 1 && stride[2] == p.K && stride[1] == p.K * p.D && stride[0] % 4 == 0;
  if (!run || reinterpret_cast<uintptr_t>(p.weight.data) % 16 != 0) return "the weight is not contiguous";
  return nullptr;
}

// Whether the components of a pose may be read as vectors of up to 16 bytes.
inline bool poses_in_runs(const Problem& p) {
  const int64_t size = p.u.storage == Storage::f32 ? 4 : 2, bytes = std::min<int64_t>(16, p.K * size);
  const auto whole = [&](int64_t offset) { return offset % bytes == 0; };
  return p.u.stride[2] == 1 && whole(p.u.stride[0] * size) && whole(p.u.stride[1] * size) &&
         whole(static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.u.data)));
}

inline int64_t tile_warps(const Problem& p) {
  return std::max<int64_t>(1, (p.J * p.D + TileSize::columns - 1) / TileSize::columns);
}

// Whether a block has two row tiles.
inline bool two_row_tiles(const Problem& p, int64_t shared_bytes) {
  return p.B > 16 && tile_warps(p) <= TileSize::warps(true) &&
         tile_bytes(static_cast<int>(tile_warps(p)), 32, static_cast<int>(p.J), static_cast<int>(p.K), true, true,
                    p.softmax_in) <= shared_bytes;
}

struct TilePlan {
  int64_t tiles, splits;
  bool together;  // the device runs all blocks of a pass at the same time
  // The last pass has one row tile a block.
  int64_t final_parts, final_splits;
};

// at_a_time: blocks of a reducing pass that the device runs.
inline TilePlan plan_tiles(const Problem& p, bool two, int64_t multiprocessors, int64_t at_a_time) {
  TilePlan plan;
  const int64_t samples = 16 * TileSize::row_tiles(two);
  plan.tiles = (p.B + samples - 1) / samples;
  const int64_t wanted = std::max(at_a_time / std::max<int64_t>(1, plan.tiles), p.I / TileSize::each_split);
  plan.splits = std::clamp<int64_t>(wanted, std::min<int64_t>(p.I, 1), std::min<int64_t>(p.I, TileSize::splits));
  plan.together = plan.tiles * plan.splits <= at_a_time;

  plan.final_parts = std::clamp<int64_t>((p.B + 15) / 16, 1, TileSize::final_parts);
  plan.final_splits =
      std::clamp<int64_t>(multiprocessors * TileSize::final_blocks / plan.final_parts, std::min<int64_t>(p.I, 1), p.I);
  return plan;
}

}  // namespace capsfast::cuda
