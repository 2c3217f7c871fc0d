// The passes on tensor cores: which calls they serve and how they cut them, with the reason beside each number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../routing.h"

namespace capsfast::cuda {

struct TileSize {
  static constexpr int columns = 32;     // (j, d) of a warp: 16 registers a lane and row tile for votes, 16 for the sum
  static constexpr int outputs = 64;     // at most: four lanes share a softmax over them, 16 logits each
  static constexpr int inputs = 8;       // whose poses are staged at a time: at most 16 KiB for each of two parts
  static constexpr int each_split = 64;  // input capsules a float32 sum runs over, unless `splits` is reached
  static constexpr int splits = 1024;    // at most: for one sample the partial sums take a few MiB
  // A block has one or two row tiles of 16 samples. With two, a weight is read once for both. One takes half the
  // registers: for small batches, and for blocks with so many warps that two tiles would not fit the registers.
  static constexpr int row_tiles(bool two) { return two ? 2 : 1; }
  static constexpr int warps(bool two) { return two ? 8 : 16; }
  // How many warps the blocks of a multiprocessor have together: three or four for each of its four register files,
  // which leaves 168 or 128 registers a thread.
  static constexpr int resident_warps(bool two) { return two ? 12 : 16; }
  static constexpr int final_warps = 12;  // of a block in the last pass: three a register file, 168 registers a thread
  static constexpr int final_blocks = 2;  // on a multiprocessor in the last pass: its shared memory holds no more
  static constexpr int final_parts =
      4;  // of dweight, each as large as the weight: more would let more blocks run, but take more memory
};

// Distance in floats between the staged poses of two input capsules. The 4 makes them start in different banks.
CAPSFAST_HOST_DEVICE constexpr int tile_pose_pitch(int samples, int K) { return samples * K + 4; }

// Distance in floats between output capsules in scores [j][row]. Four lanes read j, j + 1, j + 2 and j + 3 of a row.
// With 32 rows the pitch of 40 puts them in different banks. With 16 rows two of them share a bank; a larger pitch
// would take shared memory that V and ds need.
CAPSFAST_HOST_DEVICE constexpr int tile_score_pitch(int samples) { return samples == 32 ? 40 : samples; }

// Bytes of shared memory of a reducing pass: V and in the backward ds, poses (two parts if `parted`), and scores. For
// the softmax over the output capsules there are two buffers of logits and in the backward two of dc. For the other
// there are four arrays [j][row]: coefficients and three numbers of each column.
CAPSFAST_HOST_DEVICE constexpr int tile_bytes(int warps, int samples, int J, int K, bool parted, bool backward,
                                              bool softmax_in) {
  return 4 * (warps * TileSize::columns * samples * (backward ? 2 : 1) +
              TileSize::inputs * tile_pose_pitch(samples, K) * (parted ? 2 : 1) +
              J * tile_score_pitch(samples) * (backward || softmax_in ? 4 : 2));
}

// Null if the tile kernels serve the call, else the reason why not.
inline const char* why_no_tiles(const Problem& p) {
  if (p.votes_given) return "votes are given";
  if (p.moments) return "it is a pass of its own, with mass";
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

// Whether a block has two row tiles, 32 samples, or one.
inline bool two_row_tiles(const Problem& p, int64_t shared_bytes) {
  return p.B > 16 && tile_warps(p) <= TileSize::warps(true) &&
         tile_bytes(static_cast<int>(tile_warps(p)), 32, static_cast<int>(p.J), static_cast<int>(p.K), true, true,
                    p.softmax_in()) <= shared_bytes;
}

struct TilePlan {
  int64_t tiles, splits;              // of the samples and of the input capsules, in the reducing passes
  bool together;                      // the device runs all blocks of a reducing pass at the same time
  int64_t final_parts, final_splits;  // of the samples and of the input capsules, in the last pass
};

// at_a_time: how many blocks of a reducing pass the device runs at the same time.
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
