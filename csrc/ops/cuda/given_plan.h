// The kernels of route_votes: which calls they serve, and how they cut them up.
#pragma once

#include <algorithm>
#include <cstdint>

#include "general_plan.h"

namespace capsfast::cuda {

struct GivenSize {
  static constexpr int few = 4;    // neighbouring numbers of a vote that a thread holds: 16 bytes of float32, one load
  static constexpr int many = 16;  // or so many: fewer threads to exchange dots and scores with
  static constexpr int components = 128;  // D: in fours, those of an output capsule are lanes of one warp
  static constexpr int wide = 4;          // scores of a lane at a time, in the softmax over J
  static constexpr int together = 4;      // softmaxes of the last pass that share a pair of barriers: iterations
  static constexpr int stages = 4;    // copies that a block waits for one by one: its first sums start with a quarter
  static constexpr int samples = 16;  // of a cluster at most, as a copy's barrier serves once: half a KiB of those
  static constexpr int cluster = 8;   // blocks, the most that every device with clusters runs
  static constexpr int each_split = 64;  // chunks whose sums a thread adds up in float32, while there are splits left
  static constexpr int splits = 1024;    // partial sums of a batch of one then fill a few MiB
  static constexpr int blocks = 8;       // streaming ones a multiprocessor: some rounds of those that fit, to even out
  static constexpr int parts =
      32;  // of dlogits [I, J] in the streaming last pass: memory, against blocks to fill a device
};

// What the softmax takes: nothing over the input capsules, whose maximum each thread follows for itself; over the
// output capsules, scores from other lanes of the warp, or from all threads of the block.
enum class Exchange : int { none, warp, block };

// Votes of a thread at a time. More of them: fewer barriers, more loads on their way, and V and ds read once for more;
// a register a number, and in the last pass another for its gradient.
CAPSFAST_HOST_DEVICE constexpr int given_votes(Exchange exchange, int numbers, bool backward) {
  if (numbers == GivenSize::many) return 2;
  return exchange == Exchange::block && !backward ? 6 : 4;
}

// Threads of a block of which a multiprocessor has two. With many numbers a thread of the backward needs more than 128
// registers, for votes, V and ds, and the sum or the gradient: fewer threads have up to 168. A block that is alone has
// twice as many threads.
CAPSFAST_HOST_DEVICE constexpr int given_threads(int numbers, bool backward) {
  return numbers == GivenSize::many && backward ? 192 : 256;
}

// How the threads of a block share votes. A vote belongs to `lanes` neighbours, an input capsule to width of them, and
// `rows` input capsules stand side by side.
struct GivenShape {
  Exchange exchange;
  int numbers;                   // of a vote, in each of its lanes
  int lanes, rows, warp_rows;    // warp_rows: with the exchange in a warp, its rows
  int lanes_log, row_lanes_log;  // to base 2; row_lanes: neighbours that share a softmax over J, in a block
  int output_lanes_log;          // lanes of an output capsule, four numbers each
  int threads;

  int votes(bool backward) const { return given_votes(exchange, numbers, backward); }
};

// How votes may be read: as runs of whole input capsules, as aligned vectors, or number by number.
enum class Access : int { runs, vectors, numbers };

// Shared memory of a block, in bytes from its beginning, where a resident block has its votes. Q = J D / 4 vectors.
struct GivenMemory {
  int sums, columns;          // [rows][Q]; [rows][J][2] max and total
  int shares, share_columns;  // the same of the whole block, in two buffers in turn
  int V, ds, norm;            // [terms][Q]; [terms][J][3]
  int b, dc;                  // scores
  int copies, end;
};

inline int64_t given_element(const Problem& p) { return p.votes.storage == Storage::f32 ? 4 : 2; }  // bytes

inline int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

inline int log_of(int64_t power) {
  int log = 0;
  for (; power > 1; power /= 2) ++log;
  return log;
}

inline int64_t lanes_of(const Problem& p, int64_t numbers) { return power_of_two_from(divide_up(p.D, numbers)); }

// The reason why not, or null: these kernels serve the call.
inline const char* why_not_given(const Problem& p) {
  if (!p.votes_given) return "votes are made";
  if (p.votes.storage == Storage::f64) return "sums are formed in float32";
  if (p.empty()) return "there are no votes";
  if (p.D % GivenSize::few != 0 || p.D > GivenSize::components) return "D is not a multiple of 4, or too large";
  if (p.J * lanes_of(p, GivenSize::few) > 2 * given_threads(GivenSize::few, false)) return "J times D is too large";
  return nullptr;
}

// alone: its block is, on a multiprocessor.
inline GivenShape given_shape(const Problem& p, bool resident, bool backward, bool alone) {
  GivenShape shape{};
  // What comes from memory is read by neighbours side by side, four numbers each.
  const int64_t all = p.J * lanes_of(p, GivenSize::few), wide = p.J * lanes_of(p, GivenSize::many);
  const bool many = resident && p.D % GivenSize::many == 0 &&
                    (p.softmax_in ? all <= given_threads(GivenSize::many, true) : wide <= 32);
  shape.numbers = many ? GivenSize::many : GivenSize::few;
  shape.exchange = p.softmax_in ? Exchange::none : many ? Exchange::warp : Exchange::block;
  shape.lanes = static_cast<int>(lanes_of(p, shape.numbers));
  shape.lanes_log = log_of(shape.lanes);
  shape.output_lanes_log = log_of(lanes_of(p, GivenSize::few));
  // Threads for all output capsules, but no more rows than input capsules.
  const int64_t width = p.J * shape.lanes, wanted = given_threads(shape.numbers, backward) * (alone ? 2 : 1);
  if (shape.exchange == Exchange::warp) {
    shape.warp_rows = static_cast<int>(32 / width);
    const int64_t warps = std::clamp<int64_t>(divide_up(p.I, shape.warp_rows), divide_up(all, 32), wanted / 32);
    shape.rows = static_cast<int>(warps * shape.warp_rows);
    shape.threads = static_cast<int>(warps * 32);
    return shape;
  }
  shape.rows = static_cast<int>(std::max(std::min(wanted / width, power_of_two_from(p.I)), divide_up(all, width)));
  shape.threads = static_cast<int>(divide_up(shape.rows * width, 32) * 32);
  // As many as let one round of the block have the softmaxes of a chunk, but no more scores for each than at a time.
  const int64_t round = std::max<int64_t>(1, power_of_two_from(width / shape.votes(false) + 1) / 2);
  const int64_t enough = power_of_two_from(divide_up(p.J, GivenSize::wide));
  shape.row_lanes_log = log_of(std::min<int64_t>(std::clamp(round, enough, power_of_two_from(p.J)), 32));
  return shape;
}

inline Access given_access(const Problem& p, const GivenShape& shape) {
  const int64_t element = given_element(p), size = std::min<int64_t>(16, shape.numbers * element),
                *stride = p.votes.stride;
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.votes.data));
  // The stride of an axis of one matters to nobody.
  const auto fits = [&](int64_t length, int64_t at, int64_t bytes) { return length == 1 || at * element % bytes == 0; };
  const bool vectors = stride[3] == 1 && address % size == 0 && fits(p.B, stride[0], size) &&
                       fits(p.I, stride[1], size) && fits(p.J, stride[2], size);
  if (!vectors) return Access::numbers;
  const bool whole =
      (p.J == 1 || stride[2] == p.D) && (p.I == 1 || stride[1] == p.J * p.D) && p.J * p.D * element % 16 == 0;
  return whole && address % 16 == 0 && fits(p.B, stride[0], 16) ? Access::runs : Access::vectors;
}

}  // namespace capsfast::cuda
