// Shared memory and clusters of the kernels for given votes.
#pragma once

#include "given_plan.h"

namespace capsfast::cuda {

// Lays out arrays one after the other, each at a multiple of 16 bytes.
class GivenLayout {
 public:
  explicit GivenLayout(int64_t from) : end_((from + 15) / 16 * 16) {}
  int add(int64_t bytes) {
    const int64_t at = end_;
    end_ += (bytes + 15) / 16 * 16;
    return static_cast<int>(std::min<int64_t>(at, INT32_MAX));  // clipped: no block has so much
  }

 private:
  int64_t end_;
};

// What the shared memory of a block has to hold.
struct GivenNeeds {
  int64_t votes = 0;     // bytes of votes
  int64_t blocks = 1;    // blocks of a cluster
  int64_t terms = 0;     // for how many iterations V and ds
  int64_t together = 1;  // for how many iterations scores
  bool backward = false;
};

inline GivenMemory given_memory(const Problem& p, const GivenShape& shape, const GivenNeeds& needs) {
  const int64_t number = 4, vectors = p.J * p.D * number;
  const bool follows = p.softmax_in() && !needs.backward, shares = needs.blocks > 1;
  const int64_t scores =
      shape.exchange == Exchange::block ? needs.together * shape.rows * shape.votes(needs.backward) * p.J * number : 0;
  GivenLayout layout(needs.votes);
  GivenMemory memory{};
  memory.sums = layout.add(shape.rows * vectors);
  memory.columns = layout.add(follows ? shape.rows * p.J * 2 * number : 0);
  memory.shares = layout.add(shares ? 2 * vectors : 0);
  memory.share_columns = layout.add(shares && follows ? 2 * p.J * 2 * number : 0);
  memory.V = layout.add(needs.terms * vectors);
  memory.ds = layout.add(needs.backward ? needs.terms * vectors : 0);
  memory.norm = layout.add(p.softmax_in() ? needs.terms * p.J * 3 * number : 0);
  memory.b = layout.add(scores);
  memory.dc = layout.add(needs.backward ? scores : 0);
  memory.copies = layout.add(needs.votes > 0 ? 8 * GivenSize::stages * GivenSize::samples : 0);
  memory.end = layout.add(0);
  return memory;
}

// What a device offers the blocks of a launch. Names as in gpu::Context.
struct Offer {
  int64_t multiprocessors, shared_bytes, shared_bytes_together;
  int64_t cluster;  // blocks of a cluster at most
};

struct ResidentPlan {
  GivenShape shape{};
  GivenMemory memory{};
  Access access{};
  int cluster = 0;     // blocks that share a sample; 0 if no cluster can hold one
  int capsules = 0;    // input capsules of a block
  int stage = 0;       // input capsules of a stage of its copies, a multiple of those of a chunk
  int together = 1;    // iterations of the last pass whose softmaxes share barriers
  bool twice = false;  // a multiprocessor has shared memory for two blocks
  bool alone = false;  // each block has a multiprocessor to itself
};

// Iterations [first_term(), iterations) have gradients in the backward.
inline int64_t first_term(const Problem& p) { return p.gradient_last ? p.iterations - 1 : 0; }
inline int64_t terms_together(const Problem& p, const GivenShape& shape) {
  return shape.exchange == Exchange::block ? std::min<int64_t>(GivenSize::together, p.iterations - first_term(p)) : 1;
}

// The plan for a cluster of that many blocks, whether it fits or not.
inline ResidentPlan resident_of(const Problem& p, const GivenShape& shape, int64_t cluster, bool backward) {
  const int64_t capsules = divide_up(p.I, cluster), chunk = shape.rows * shape.votes(backward);
  GivenNeeds needs;
  needs.votes = capsules * p.J * p.D * given_element(p);
  needs.blocks = cluster;
  needs.terms = backward ? p.iterations - first_term(p) : 1;
  needs.together = backward ? terms_together(p, shape) : 1;
  needs.backward = backward;
  ResidentPlan plan;
  plan.shape = shape;
  plan.access = given_access(p, shape);
  plan.cluster = static_cast<int>(cluster);
  plan.capsules = static_cast<int>(capsules);
  plan.stage = static_cast<int>(divide_up(divide_up(capsules, GivenSize::stages), chunk) * chunk);
  plan.together = static_cast<int>(needs.together);
  plan.memory = given_memory(p, shape, needs);
  return plan;
}

// The plan for the smallest cluster whose blocks fit a multiprocessor twice, or if there is none the smallest that
// holds a sample. Small batches get larger clusters.
inline ResidentPlan smallest_resident(const Problem& p, const GivenShape& shape, const Offer& offer, bool backward) {
  const int64_t chunk = shape.rows * shape.votes(backward);
  ResidentPlan chosen;
  for (int64_t cluster = 1; cluster <= std::min(offer.cluster, p.I); cluster *= 2) {
    if (divide_up(p.I, cluster) * p.J * p.D * given_element(p) > offer.shared_bytes) continue;
    ResidentPlan plan = resident_of(p, shape, cluster, backward);
    const int64_t bytes = plan.memory.end;
    if (bytes > offer.shared_bytes) continue;
    // As long as multiprocessors would be idle, more blocks are taken, if each gets at least a chunk of input capsules.
    const bool idle = p.B * cluster <= offer.multiprocessors;
    plan.twice = 2 * (bytes + 1024) <= offer.shared_bytes_together;
    plan.alone = idle || !plan.twice;
    if (chosen.cluster == 0 || (plan.twice && !chosen.twice) || (idle && p.I >= cluster * chunk)) chosen = plan;
  }
  return chosen;
}

// Plans a cluster of as few blocks as possible, since their partial sums have to be joined. But a multiprocessor should
// hold two blocks, so that one computes while the other waits for copies or for its cluster.
//
// Even a batch of one goes here: routing a sample that fits a cluster takes little time compared with a launch for each
// pass.
inline ResidentPlan plan_resident(const Problem& p, const Offer& offer, bool backward) {
  const ResidentPlan plan = smallest_resident(p, given_shape(p, backward, false), offer, backward);
  if (!plan.alone) return plan;
  const ResidentPlan large = smallest_resident(p, given_shape(p, backward, true), offer, backward);
  return large.cluster == plan.cluster ? large : plan;
}

}  // namespace capsfast::cuda
