// How the kernels for votes cut a call, and what the shared memory of a block holds, with the reason beside each
// number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../choose.h"
#include "../params.h"

namespace capsfast::cuda {

struct VotesSize {
  static constexpr int few = 4;       // components of a vote that a thread has: 16 bytes of float32, one load
  static constexpr int many = 16;     // or so many: then fewer threads have to exchange dot products and scores
  static constexpr int wide = 4;      // how many scores a lane loads at a time in the softmax over J
  static constexpr int together = 4;  // iterations of the gradient pass whose softmaxes share a pair of barriers
  static constexpr int stages = 4;  // copies of a sample, awaited one by one: a quarter of the votes suffices to start
  static constexpr int samples = 16;  // at most for a cluster: their copies need barriers, half a KiB in all
  static constexpr int cluster = 8;   // blocks of a cluster at most: every device with clusters has so many
};

// Which threads have to exchange scores for the softmax. none: softmax over the input capsules, where each thread keeps
// a maximum of its own. warp, block: softmax over the output capsules, whose scores are in one warp or in all threads
// of the block.
enum class Exchange : int { none, warp, block };

// How many votes a thread has at a time. More of them need fewer barriers, keep more loads under way, and read V and ds
// less often. But each element of a vote takes a register, and in the gradient pass another for its gradient.
CAPSFAST_HOST_DEVICE constexpr int votes_at_a_time(Exchange exchange, int elements, bool backward) {
  if (elements == VotesSize::many) return 2;
  return exchange == Exchange::block && !backward ? 6 : 4;
}

// Threads of a block, if a multiprocessor runs two blocks; if it runs one, the block has twice as many. In the backward
// a thread with `many` elements needs more than 128 registers, for votes, V, ds, and the sum or the gradient. With
// fewer threads each can have 168.
CAPSFAST_HOST_DEVICE constexpr int votes_threads(int elements, bool backward) {
  return elements == VotesSize::many && backward ? 192 : 256;
}

// How the threads of a block share votes. A vote belongs to `lanes` neighbouring threads, an input capsule (its J
// votes) to J `lanes` of them, called a row, and a block has `rows` input capsules at a time.
struct VotesShape {
  Exchange exchange;
  int elements;                  // of a vote that a thread has
  int lanes, rows, warp_rows;    // warp_rows: rows of a warp, with Exchange::warp
  int lanes_log, row_lanes_log;  // base 2; row_lanes: lanes that share a softmax over J, with Exchange::block
  int output_lanes_log;          // base 2, of the lanes of an output capsule (OutputCoord), a quad each
  int threads;

  int votes(bool backward) const { return votes_at_a_time(exchange, elements, backward); }
};

// How votes may be read: in runs of whole input capsules, in aligned vectors of a thread's elements, or element by
// element.
enum class Access : int { runs, vectors, elements };

// Where the arrays of a block begin in its shared memory, in bytes. The votes come before them. Elements are quads of
// floats where the shape says Q = J D / 4, else floats.
struct VotesMemory {
  int sums, columns;          // [rows][Q]; [rows][J][2], max and total of each row
  int shares, share_columns;  // [2][Q]; [2][J][2]: the same for the whole block, in two buffers in turn
  int V, ds, norm;            // [terms][Q] each; [terms][J][3], max, scale and mean
  int b, dc;                  // scores, see VotesScores
  int copies, end;            // what Copies needs; size of all
};

// How many lanes a vote has if each has so many elements of it.
inline int64_t lanes_of(const Problem& p, int64_t elements) { return power_of_two_from(divide_up(p.D, elements)); }

// alone: a multiprocessor runs one block of this shape at a time, else two.
inline VotesShape votes_shape(const Problem& p, bool backward, bool alone) {
  VotesShape shape{};
  const int64_t all = p.J * lanes_of(p, VotesSize::few), wide = p.J * lanes_of(p, VotesSize::many);
  const bool many =
      p.D % VotesSize::many == 0 && (p.softmax_in() ? all <= votes_threads(VotesSize::many, true) : wide <= 32);
  shape.elements = many ? VotesSize::many : VotesSize::few;
  shape.exchange = p.softmax_in() ? Exchange::none : many ? Exchange::warp : Exchange::block;
  shape.lanes = static_cast<int>(lanes_of(p, shape.elements));
  shape.lanes_log = log_of(shape.lanes);
  shape.output_lanes_log = log_of(lanes_of(p, VotesSize::few));
  // As many rows as `wanted` threads have, but no more than there are input capsules. There are at least `all` threads,
  // as each output capsule needs its own (OutputCoord).
  const int64_t width = p.J * shape.lanes, wanted = votes_threads(shape.elements, backward) * (alone ? 2 : 1);
  if (shape.exchange == Exchange::warp) {
    shape.warp_rows = static_cast<int>(32 / width);
    const int64_t warps = std::clamp<int64_t>(divide_up(p.I, shape.warp_rows), divide_up(all, 32), wanted / 32);
    shape.rows = static_cast<int>(warps * shape.warp_rows);
    shape.threads = static_cast<int>(warps * 32);
    return shape;
  }
  shape.rows = static_cast<int>(std::max(std::min(wanted / width, power_of_two_from(p.I)), divide_up(all, width)));
  shape.threads = static_cast<int>(divide_up(shape.rows * width, 32) * 32);
  // Lanes for a softmax over J: so many that the block does all softmaxes of a chunk in one round (`round`), but at
  // least so many that a lane has no more scores than it loads at a time (`enough`).
  const int64_t round = std::max<int64_t>(1, power_of_two_from(width / shape.votes(false) + 1) / 2);
  const int64_t enough = power_of_two_from(divide_up(p.J, VotesSize::wide));
  shape.row_lanes_log = log_of(std::min<int64_t>(std::clamp(round, enough, power_of_two_from(p.J)), 32));
  return shape;
}

inline Access votes_access(const Problem& p, const VotesShape& shape) {
  const int64_t element = element_bytes(p.votes.storage), size = std::min<int64_t>(16, shape.elements * element),
                *stride = p.votes.stride;
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.votes.data));
  // The stride of an axis of length 1 has no meaning.
  const auto fits = [&](int64_t length, int64_t at, int64_t bytes) { return length == 1 || at * element % bytes == 0; };
  const bool vectors = stride[3] == 1 && address % size == 0 && fits(p.B, stride[0], size) &&
                       fits(p.I, stride[1], size) && fits(p.J, stride[2], size);
  if (!vectors) return Access::elements;
  const bool whole =
      (p.J == 1 || stride[2] == p.D) && (p.I == 1 || stride[1] == p.J * p.D) && p.J * p.D * element % 16 == 0;
  return whole && address % 16 == 0 && fits(p.B, stride[0], 16) ? Access::runs : Access::vectors;
}

// Lays out arrays one after the other, each at a multiple of 16 bytes.
class SharedLayout {
 public:
  explicit SharedLayout(int64_t from) : end_((from + 15) / 16 * 16) {}
  int add(int64_t bytes) {
    const int64_t at = end_;
    end_ += (bytes + 15) / 16 * 16;
    return static_cast<int>(std::min<int64_t>(at, INT32_MAX));  // clipped: no block has so much
  }

 private:
  int64_t end_;
};

// What a device offers the blocks of a launch. Names as in gpu::Context.
struct DeviceLimits {
  int64_t multiprocessors, shared_bytes, shared_bytes_together;
  int64_t cluster;  // blocks of a cluster at most
};

struct VotesPlan {
  VotesShape shape{};
  VotesMemory memory{};
  Access access{};
  int cluster = 0;     // blocks that share a sample; 0 if no cluster can hold one
  int capsules = 0;    // input capsules of a block
  int stage = 0;       // input capsules of a stage of its copies, a multiple of those of a chunk
  int together = 1;    // iterations of the gradient pass whose softmaxes share barriers
  bool twice = false;  // a multiprocessor has shared memory for two blocks
  bool alone = false;  // each block has a multiprocessor to itself
};

// Iterations [first_term(), iterations) have gradients in the backward.
inline int64_t first_term(const Problem& p) { return p.gradient_last ? p.iterations - 1 : 0; }

// What the shared memory of a block holds behind its votes.
inline VotesMemory votes_memory(const Problem& p, const VotesPlan& plan, bool backward) {
  const VotesShape& shape = plan.shape;
  const int64_t bytes = sizeof(float), vectors = p.J * p.D * bytes;
  const int64_t terms = backward ? p.iterations - first_term(p) : 1;
  const bool follows = p.softmax_in() && !backward, shares = plan.cluster > 1;
  const int64_t scores =
      shape.exchange == Exchange::block ? plan.together * shape.rows * shape.votes(backward) * p.J * bytes : 0;
  SharedLayout layout(plan.capsules * p.J * p.D * element_bytes(p.votes.storage));
  VotesMemory memory{};
  memory.sums = layout.add(shape.rows * vectors);
  memory.columns = layout.add(follows ? shape.rows * p.J * 2 * bytes : 0);
  memory.shares = layout.add(shares ? 2 * vectors : 0);
  memory.share_columns = layout.add(shares && follows ? 2 * p.J * 2 * bytes : 0);
  memory.V = layout.add(terms * vectors);
  memory.ds = layout.add(backward ? terms * vectors : 0);
  memory.norm = layout.add(p.softmax_in() ? terms * p.J * 3 * bytes : 0);
  memory.b = layout.add(scores);
  memory.dc = layout.add(backward ? scores : 0);
  memory.copies = layout.add(8 * VotesSize::stages * VotesSize::samples);
  memory.end = layout.add(0);
  return memory;
}

// The plan for a cluster of that many blocks, whether it fits or not.
inline VotesPlan plan_cluster(const Problem& p, const VotesShape& shape, int64_t cluster, bool backward) {
  const int64_t capsules = divide_up(p.I, cluster), chunk = shape.rows * shape.votes(backward);
  VotesPlan plan;
  plan.shape = shape;
  plan.access = votes_access(p, shape);
  plan.cluster = static_cast<int>(cluster);
  plan.capsules = static_cast<int>(capsules);
  plan.stage = static_cast<int>(divide_up(divide_up(capsules, VotesSize::stages), chunk) * chunk);
  if (backward && shape.exchange == Exchange::block)
    plan.together = static_cast<int>(std::min<int64_t>(VotesSize::together, p.iterations - first_term(p)));
  plan.memory = votes_memory(p, plan, backward);
  return plan;
}

// The plan for the smallest cluster whose blocks fit a multiprocessor twice, or if there is none the smallest that
// holds a sample. Small batches get larger clusters.
inline VotesPlan plan_smallest_cluster(const Problem& p, const VotesShape& shape, const DeviceLimits& device,
                                       bool backward) {
  const int64_t chunk = shape.rows * shape.votes(backward);
  VotesPlan chosen;
  for (int64_t cluster = 1; cluster <= std::min(device.cluster, p.I); cluster *= 2) {
    if (divide_up(p.I, cluster) * p.J * p.D * element_bytes(p.votes.storage) > device.shared_bytes) continue;
    VotesPlan plan = plan_cluster(p, shape, cluster, backward);
    const int64_t bytes = plan.memory.end;
    if (bytes > device.shared_bytes) continue;
    // As long as multiprocessors would be idle, more blocks are taken, if each gets at least a chunk of input capsules.
    const bool idle = p.B * cluster <= device.multiprocessors;
    plan.twice = 2 * (bytes + 1024) <= device.shared_bytes_together;
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
inline VotesPlan plan_votes(const Problem& p, const DeviceLimits& device, bool backward) {
  const VotesPlan plan = plan_smallest_cluster(p, votes_shape(p, backward, false), device, backward);
  if (!plan.alone) return plan;
  const VotesPlan large = plan_smallest_cluster(p, votes_shape(p, backward, true), device, backward);
  return large.cluster == plan.cluster ? large : plan;
}

}  // namespace capsfast::cuda
