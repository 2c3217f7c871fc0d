// How the columns family cuts a call, with the reason beside each number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../cuda/context.h"
#include "kernels.h"

namespace capsfast::cuda::columns {

struct Size {
  // Weights in shared memory should take no more than this, so that V and ds of a block's strips have an L1 cache.
  static constexpr int ring_bytes = 112 * 1024;
  // What a warp costs before its first and after its last input capsule: as much as this number of input capsules.
  static constexpr int64_t start = 2;
  // Most partial sums of dweight, each as large as the weight, if there are input capsules for all blocks.
  static constexpr int64_t parts = 4;
};

struct Plan {
  Cut pass, gradient;
  int gradient_parts;  // of the batch
  int together;        // input capsules whose pairs are stored at a time
  bool stored;         // the passes that accumulate store the pairs of all input capsules
};

class Planner {
 public:
  Planner(const Problem& problem, const Inputs& inputs, const Kernels& kernels, const gpu::Context& context)
      : p(problem),
        in(inputs),
        by(kernels),
        on(context),
        strips_(static_cast<int>(divide_up(problem.B, kStrip))),
        lanes_(lanes_of(problem.D)),
        all_warps_(static_cast<int>(divide_up(problem.J, outputs_of(kernels.tiles, lanes_)))) {}

  int strips() const { return strips_; }

  // False if no block of threads fits shared memory.
  bool plan(bool backward, int paired_iterations, Plan* to) const {
    const int shared =
        std::min(gpu::limits().of(by.pass[backward][0]).shared_bytes, gpu::limits().of(by.gradient).shared_bytes);
    for (int warps = std::min(kMostColumnWarps, all_warps_); warps > 0; --warps) {
      Cut cut = common(warps);
      to->pass = cut;
      to->gradient = cut;
      if (!plan_pass(shared, &to->pass)) continue;
      plan_pairs(paired_iterations, to);
      if (!backward || plan_gradient(shared, to)) return true;
    }
    return false;
  }

 private:
  Cut common(int most_warps) const {
    Cut cut{};
    cut.sections = static_cast<int>(divide_up(all_warps_, most_warps));
    cut.warps = static_cast<int>(divide_up(all_warps_, cut.sections));
    cut.lanes = lanes_;
    const int64_t size = element_bytes(in.matrix.storage);
    const auto whole = [&](int64_t elements) { return elements * size % 16 == 0; };
    const auto starts = [](const void* data, int64_t bytes) {
      return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
    };
    const bool full = p.D == kSpan * lanes_;
    if (p.votes_given) {
      const int64_t* votes = in.matrix.stride;
      cut.in_pieces =
          full && votes[3] == 1 && whole(votes[0]) && whole(votes[1]) && whole(votes[2]) && starts(p.votes.data, 16);
      return cut;
    }
    cut.in_pieces = whole(p.K) && whole(in.matrix.stride[0]) && starts(p.weight.data, 16);
    cut.in_bulk = cut.in_pieces && full && p.K == by.loaded_poses * 4;
    const int64_t loaded = by.loaded_poses;
    const int64_t* u = in.u.stride;
    const auto step = [](int64_t length, int64_t stride) { return length == 1 ? 0 : stride; };
    const int64_t sample = step(p.B, u[0]), capsule = step(p.I, u[1]);
    cut.poses_whole = u[2] == 1 && p.K % loaded == 0 && sample % loaded == 0 && capsule % loaded == 0 &&
                      starts(p.u.data, std::min<int64_t>(loaded * size, 16)) &&
                      (p.B * sample + p.I * capsule + p.K) * size <= UINT32_MAX;  // Poses has offsets of 32 bits
    return cut;
  }

  // Strips of a block: two strips read a weight only once. Strips beyond the batch cost as much as others, so at most
  // an eighth of the strips may lie there.
  int strips_for(int teams) const {
    const int strips = std::min(kMostStrips, teams);
    return strips > 1 && 8 * strips * divide_up(strips_, strips) > 9 * strips_ ? 1 : strips;
  }

  bool plan_pass(int shared, Cut* cut) const {
    const int teams = std::max(1, by.most_warps / cut->warps);
    bool fits = false;
    if (cut->warps > by.most_warps) return false;
    for (int streams = std::max(1, teams / strips_for(teams)); streams > 0 && !fits; --streams) {
      cut->strips = strips_for(teams);
      cut->streams = static_cast<int>(std::min<int64_t>(streams, p.I));
      for (const auto& [depth, stages] : {std::pair(4, 3), std::pair(2, 3), std::pair(2, 2), std::pair(1, 2)}) {
        cut->chunk = depth * cut->streams;
        cut->stages = stages;
        const bool least = depth == 1 && stages == 2;
        fits = by.pass_bytes(in, *cut) <= (least ? shared : std::min(shared, Size::ring_bytes));
        if (fits) break;
      }
    }
    if (!fits) return false;
    cut->groups = static_cast<int>(divide_up(strips_, cut->strips));
    // Takes the splits with the fewest turns of a stream, over the `waves` blocks that a multiprocessor runs one after
    // the other.
    constexpr int64_t kMostWaves = 16;
    const int64_t blocks = int64_t{cut->groups} * cut->sections;
    int64_t fewest = INT64_MAX;
    for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
      const int64_t most = std::clamp<int64_t>(waves * on.multiprocessors / blocks, 1, p.I);
      const int64_t turns = divide_up(divide_up(p.I, most), cut->streams);
      const int64_t splits = divide_up(p.I, turns * cut->streams);  // the fewest with so few turns
      const int64_t cost = divide_up(blocks * splits, on.multiprocessors) * (turns + Size::start);
      if (cost >= fewest) continue;
      fewest = cost;
      cut->splits = static_cast<int>(splits);
    }
    return true;
  }

  bool plan_gradient(int shared, Plan* to) const {
    Cut* cut = &to->gradient;
    cut->stages = 2;
    cut->strips = std::min(kMostStrips, strips_);
    cut->groups = static_cast<int>(divide_up(strips_, cut->strips));
    const int most = std::max(1, by.most_warps / cut->warps);
    for (cut->streams = std::min(most, to->together); cut->streams > 0; --cut->streams) {
      cut->chunk = cut->streams;
      if (cut->warps <= by.most_warps && by.gradient_bytes(in, *cut) <= shared) break;
    }
    if (cut->streams == 0) return false;
    // With a shared weight every stream of every split has an input capsule.
    const int64_t groups = cut->groups,
                  chunks = p.shared_weight ? to->together / cut->streams : divide_up(to->together, cut->chunk);
    const int64_t multiprocessors = on.multiprocessors;
    // Takes the parts with the fewest rounds of a block; a round is a stage for a group of strips. More parts of
    // dweight must save a sixteenth of the rounds, because parts are written, read and added up. Given votes have no
    // dweight.
    const int64_t few = chunks < multiprocessors || p.votes_given ? multiprocessors : Size::parts;
    int64_t fewest = INT64_MAX;
    for (int64_t parts = 1; parts <= std::min({groups, few, multiprocessors}); ++parts) {
      const int64_t splits = std::min<int64_t>({chunks, std::max<int64_t>(1, multiprocessors / parts), 65535});
      const int64_t rounds = divide_up(groups, parts) * divide_up(chunks, splits);
      if (parts > 1 && 16 * rounds > 15 * fewest) continue;
      fewest = rounds;
      to->gradient_parts = static_cast<int>(parts);
      cut->splits = static_cast<int>(splits);
    }
    return true;
  }

  void plan_pairs(int iterations, Plan* to) const {
    const int64_t bytes = int64_t{4} * strips_ * to->pass.column_warps() * by.pairs * iterations;  // an input capsule
    const int64_t most = std::max<int64_t>(1, on.pairs_bytes / std::max<int64_t>(1, bytes));
    to->stored = most >= p.I;
    to->together = static_cast<int>(divide_up(p.I, divide_up(p.I, most)));  // equal parts
  }

  const Problem& p;
  const Inputs& in;
  const Kernels& by;
  const gpu::Context& on;
  const int strips_, lanes_, all_warps_;
};

}  // namespace capsfast::cuda::columns
