// The kernels of route_votes: which calls they serve and how they cut them, with the reason beside each number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "general_plan.h"

namespace capsfast::cuda {

struct GivenSize {
  static constexpr int few = 4;           // components of a vote that a thread has: 16 bytes of float32, one load
  static constexpr int many = 16;         // or so many: then fewer threads have to exchange dot products and scores
  static constexpr int components = 128;  // the largest D: one warp has all components of an output capsule
  static constexpr int wide = 4;          // how many scores a lane loads at a time in the softmax over J
  static constexpr int together = 4;      // iterations of the last pass whose softmaxes share a pair of barriers
  static constexpr int stages = 4;  // copies of a sample, awaited one by one: a quarter of the votes suffices to start
  static constexpr int samples = 16;  // at most for a cluster: their copies need barriers, half a KiB in all
  static constexpr int cluster = 8;   // blocks of a cluster at most: every device with clusters has so many
};

// Which threads have to exchange scores for the softmax. none: softmax over the input capsules, where each thread keeps
// a maximum of its own. warp, block: softmax over the output capsules, whose scores are in one warp or in all threads
// of the block.
enum class Exchange : int { none, warp, block };

// How many votes a thread has at a time. More of them need fewer barriers, keep more loads under way, and read V and ds
// less often. But each number of a vote takes a register, and in the last pass another for its gradient.
CAPSFAST_HOST_DEVICE constexpr int given_votes(Exchange exchange, int numbers, bool backward) {
  if (numbers == GivenSize::many) return 2;
  return exchange == Exchange::block && !backward ? 6 : 4;
}

// Threads of a block, if a multiprocessor runs two blocks; if it runs one, the block has twice as many. In the backward
// a thread with `many` numbers needs more than 128 registers, for votes, V, ds, and the sum or the gradient. With fewer
// threads each can have 168.
CAPSFAST_HOST_DEVICE constexpr int given_threads(int numbers, bool backward) {
  return numbers == GivenSize::many && backward ? 192 : 256;
}

// How the threads of a block share votes. A vote belongs to `lanes` neighbouring threads, an input capsule (its J
// votes) to J `lanes` of them, called a row, and a block has `rows` input capsules at a time.
struct GivenShape {
  Exchange exchange;
  int numbers;                   // of a vote that a thread has
  int lanes, rows, warp_rows;    // warp_rows: rows of a warp, with Exchange::warp
  int lanes_log, row_lanes_log;  // base 2; row_lanes: lanes that share a softmax over J, with Exchange::block
  int output_lanes_log;          // base 2, of the lanes of an output capsule (Output), four numbers each
  int threads;

  int votes(bool backward) const { return given_votes(exchange, numbers, backward); }
};

// How votes may be read: in runs of whole input capsules, in aligned vectors of a thread's numbers, or number by
// number.
enum class Access : int { runs, vectors, numbers };

// Where the arrays of a block begin in its shared memory, in bytes. The votes come before them.
// Elements are vectors of four floats where the shape says Q = J D / 4, else floats.
struct GivenMemory {
  int sums, columns;          // [rows][Q]; [rows][J][2], max and total of each row
  int shares, share_columns;  // [2][Q]; [2][J][2]: the same for the whole block, in two buffers in turn
  int V, ds, norm;            // [terms][Q] each; [terms][J][3], max, scale and mean
  int b, dc;                  // scores, see GivenScores
  int copies, end;            // what Copies needs; size of all
};

inline int64_t given_element(const Problem& p) { return p.votes.storage == Storage::f32 ? 4 : 2; }  // in bytes

// The smallest power of two >= n.
inline int64_t power_of_two_from(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// The logarithm of a power of two to base 2.
inline int log_of(int64_t power) {
  int log = 0;
  for (; power > 1; power /= 2) ++log;
  return log;
}

// How many lanes a vote has if each has so many numbers of it.
inline int64_t lanes_of(const Problem& p, int64_t numbers) { return power_of_two_from(divide_up(p.D, numbers)); }

// Null if these kernels serve the call, else the reason why not.
inline const char* why_not_given(const Problem& p) {
  if (!p.votes_given) return "votes are made";
  if (p.moments) return "it is a pass of its own, with mass";
  if (p.votes.storage == Storage::f64) return "sums are formed in float32";
  if (p.empty()) return "there are no votes";
  if (p.D % GivenSize::few != 0 || p.D > GivenSize::components) return "D is not a multiple of 4, or too large";
  if (p.J * lanes_of(p, GivenSize::few) > 2 * given_threads(GivenSize::few, false)) return "J times D is too large";
  return nullptr;
}

// alone: a multiprocessor runs one block of this shape at a time, else two.
inline GivenShape given_shape(const Problem& p, bool backward, bool alone) {
  GivenShape shape{};
  const int64_t all = p.J * lanes_of(p, GivenSize::few), wide = p.J * lanes_of(p, GivenSize::many);
  const bool many =
      p.D % GivenSize::many == 0 && (p.softmax_in() ? all <= given_threads(GivenSize::many, true) : wide <= 32);
  shape.numbers = many ? GivenSize::many : GivenSize::few;
  shape.exchange = p.softmax_in() ? Exchange::none : many ? Exchange::warp : Exchange::block;
  shape.lanes = static_cast<int>(lanes_of(p, shape.numbers));
  shape.lanes_log = log_of(shape.lanes);
  shape.output_lanes_log = log_of(lanes_of(p, GivenSize::few));
  // As many rows as `wanted` threads have, but no more than there are input capsules. There are at least `all` threads,
  // as each output capsule needs its own (Output).
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
  // Lanes for a softmax over J: so many that the block does all softmaxes of a chunk in one round (`round`), but at
  // least so many that a lane has no more scores than it loads at a time (`enough`).
  const int64_t round = std::max<int64_t>(1, power_of_two_from(width / shape.votes(false) + 1) / 2);
  const int64_t enough = power_of_two_from(divide_up(p.J, GivenSize::wide));
  shape.row_lanes_log = log_of(std::min<int64_t>(std::clamp(round, enough, power_of_two_from(p.J)), 32));
  return shape;
}

inline Access given_access(const Problem& p, const GivenShape& shape) {
  const int64_t element = given_element(p), size = std::min<int64_t>(16, shape.numbers * element),
                *stride = p.votes.stride;
  const int64_t address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.votes.data));
  // The stride of an axis of length 1 has no meaning.
  const auto fits = [&](int64_t length, int64_t at, int64_t bytes) { return length == 1 || at * element % bytes == 0; };
  const bool vectors = stride[3] == 1 && address % size == 0 && fits(p.B, stride[0], size) &&
                       fits(p.I, stride[1], size) && fits(p.J, stride[2], size);
  if (!vectors) return Access::numbers;
  const bool whole =
      (p.J == 1 || stride[2] == p.D) && (p.I == 1 || stride[1] == p.J * p.D) && p.J * p.D * element % 16 == 0;
  return whole && address % 16 == 0 && fits(p.B, stride[0], 16) ? Access::runs : Access::vectors;
}

}  // namespace capsfast::cuda
