// Which votes a thread works on, and its components of them in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "../warp.h"
#include "plan.h"

namespace capsfast::cuda {

// Four components.
using Quad = Run<float, VotesSize::few>;

CAPSFAST_DEVICE void narrow(float x, float* to) { *to = x; }
CAPSFAST_DEVICE void narrow(float x, BFloat16* to) { to->bits = float_to_bf16(x); }
CAPSFAST_DEVICE void narrow(float x, Float16* to) { to->bits = float_to_half(x); }

// kCount components, in quads. These may be in another order than in memory (ThreadCoord::quad), which is the same for
// all vectors of a thread.
template <int kCount>
struct Vector {
  static constexpr int elements = kCount, quads = kCount / VotesSize::few;
  float value[kCount];

  CAPSFAST_DEVICE Quad quad(int n) const {
    return {value[4 * n], value[4 * n + 1], value[4 * n + 2], value[4 * n + 3]};
  }
  CAPSFAST_DEVICE void set_quad(int n, const Quad& x) {
#pragma unroll
    for (int k = 0; k < VotesSize::few; ++k) value[VotesSize::few * n + k] = x.value[k];
  }
};

using QuadVector = Vector<VotesSize::few>;

template <int kCount>
CAPSFAST_DEVICE float product(const Vector<kCount>& a, const Vector<kCount>& b) {
  float sum[2] = {0.0f, 0.0f};  // two chains of additions, to hide their latency
#pragma unroll
  for (int n = 0; n < kCount; ++n) sum[n / 4 % 2] += a.value[n] * b.value[n];
  return sum[0] + sum[1];
}

template <int kCount>
CAPSFAST_DEVICE Vector<kCount> scaled(float factor, const Vector<kCount>& x) {
  Vector<kCount> to;
#pragma unroll
  for (int n = 0; n < kCount; ++n) to.value[n] = factor * x.value[n];
  return to;
}

// to += factor x.
template <int kCount>
CAPSFAST_DEVICE void add(float factor, const Vector<kCount>& x, Vector<kCount>* to) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) to->value[n] += factor * x.value[n];
}

// What the kernels are compiled for: the element type of the votes, how many components of a vote a thread has, and the
// exchange.
template <class E, int kElements, Exchange kExchange>
struct VotesTraits {
  using Type = E;
  using Elements = Vector<kElements>;
  static constexpr int elements = kElements;
  static constexpr int unit =
      kElements * static_cast<int>(sizeof(E)) < 16 ? kElements : 16 / static_cast<int>(sizeof(E));  // loaded at once
  static constexpr int units = kElements / unit;
  static constexpr Exchange exchange = kExchange;
  static constexpr bool in = kExchange == Exchange::none;  // softmax over the input capsules
  // Votes of a thread at a time, and the most threads of a block.
  static constexpr int forward = votes_at_a_time(kExchange, kElements, false),
                       backward = votes_at_a_time(kExchange, kElements, true);
  static constexpr int forward_threads = 2 * votes_threads(kElements, false),
                       backward_threads = 2 * votes_threads(kElements, true);
  using Unit = Run<E, unit>;
};

// A thread's coordinates among those that share votes (VotesShape): output capsule j of the input capsule of `row`, and
// some of the components. A block may have more threads than it needs. The others (`mine` is false) repeat the work of
// one of these, so that they can take part in shuffles and barriers, and write nothing.
template <class Traits>
struct ThreadCoord {
  int lanes, rows, row, j;
  int segment, end, step;  // Exchange::warp: lanes of a row; the lane after its last; lanes from j to j + 1
  int from;                // the first of this thread's components
  int turn;                // see unit()
  bool mine;

  CAPSFAST_DEVICE ThreadCoord(const VotesShape& shape, const Inputs& in) : lanes(shape.lanes), rows(shape.rows) {
    const int J = static_cast<int>(in.J), last = static_cast<int>(in.D) / Traits::elements - 1, thread = gpu::thread();
    segment = J * lanes;
    end = 32;
    step = 0;
    int lane = thread & (lanes - 1);  // `lanes` is a power of two
    if constexpr (Traits::exchange == Exchange::warp) {
      const int part = thread % 32 / segment, at = thread % 32 - part * segment;
      mine = part < shape.warp_rows;
      if (mine) {
        end = (part + 1) * segment;
        step = lanes;
      }
      row = mine ? thread / 32 * shape.warp_rows + part : 0;
      j = at >> shape.lanes_log;  // lanes after the last row of a warp are fewer than a row
      lane = at & (lanes - 1);
    } else {
      int group = thread >> shape.lanes_log;
      mine = group < rows * J;
      if (!mine) group = rows * J - 1;  // that group is in the same warp
      row = group / J;
      j = group - row * J;
    }
    if (lane > last) mine = false;
    from = Traits::elements * (lane < last ? lane : last);
    turn = thread * Traits::units / 8 % Traits::units;
  }

  // Whether this thread writes what a vote has one of, such as its score.
  CAPSFAST_DEVICE bool leads() const { return mine && from == 0; }
  // Which unit of its components the thread reads n-th. The order differs between lanes: if all read their n-th unit at
  // the same time, they would read the same banks of shared memory.
  CAPSFAST_DEVICE int unit(int n) const { return n ^ turn; }
  // Which quad of the output capsule this thread's n-th one is.
  CAPSFAST_DEVICE int quad(int n) const {
    constexpr int kQuads = Traits::unit / VotesSize::few;
    return from / VotesSize::few + unit(n / kQuads) * kQuads + n % kQuads;
  }
};

// What a block works on: input capsules [begin, begin + count) of sample b.
struct Part {
  int64_t b, begin;
  int count;

  // capsules: how many a block has, but for the last blocks, which may have fewer or none.
  CAPSFAST_DEVICE Part(const Inputs& in, int64_t sample, int64_t part, int capsules)
      : b(sample), begin(part * capsules) {
    const int64_t left = in.I > begin ? in.I - begin : 0;
    count = left < capsules ? static_cast<int>(left) : capsules;
  }
};

// The votes that a thread has at a time: vote n is that of input capsule first + row + n rows of the part. Bit n of
// `valid` is set if it exists and neither mask drops it. Bit n of `inside` is set if it exists and this thread writes
// its results.
struct Chunk {
  int first;
  unsigned inside, valid;
};

// output_valid: whether out_mask keeps the output capsule of this thread.
template <int kCount, class Traits>
CAPSFAST_DEVICE Chunk chunk_at(const Inputs& in, const ThreadCoord<Traits>& at, const Part& part, bool output_valid,
                               int first) {
  unsigned there = (1u << kCount) - 1;
  if (first + kCount * at.rows > part.count) {
    there = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) there |= static_cast<unsigned>(first + at.row + n * at.rows < part.count) << n;
  }
  Chunk chunk{first, at.mine ? there : 0, output_valid ? there : 0};
  if (!in.mask.data || chunk.valid == 0) return chunk;
  const int64_t from = part.b * in.mask.stride[0] + (part.begin + first + at.row) * in.mask.stride[1],
                step = at.rows * in.mask.stride[1];
  int64_t element = from;
#pragma unroll
  for (int n = 0; n < kCount; ++n, element += step) {
    // Reads the mask of vote 0 for a vote that does not exist, so that the loads need no branch. If any vote exists,
    // vote 0 does.
    const bool masked = in.mask.data[chunk.valid >> n & 1 ? element : from] == 0;
    if (masked) chunk.valid &= ~(1u << n);
  }
  return chunk;
}

// to[n] = votes[n] . with, in all lanes of the vote.
template <int kCount, class Traits>
CAPSFAST_DEVICE void dots(const ThreadCoord<Traits>& at, const typename Traits::Elements (&votes)[kCount],
                          const typename Traits::Elements& with, float (&to)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[n] = product(votes[n], with);
  for (int mask = at.lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) to[n] += gpu::shuffle_xor(to[n], mask);
  }
}

// Calls f(n, m) for each vote n whose bit is set in `which`. m is its element of a tensor [B, I, J].
template <int kCount, class Traits, class F>
CAPSFAST_DEVICE void for_each_vote(const Operand& of, const ThreadCoord<Traits>& at, const Part& part, int first,
                                   unsigned which, const F& f) {
  const int64_t step = at.rows * of.stride[1];
  int64_t element = part.b * of.stride[0] + (part.begin + first + at.row) * of.stride[1] + at.j * of.stride[2];
#pragma unroll
  for (int n = 0; n < kCount; ++n, element += step) {
    if (which >> n & 1) f(n, element);
  }
}

// to[n] += the element of `from` [B, I, J] for each valid vote n. The type is looked at once for all of them.
template <int kCount, class Traits>
CAPSFAST_DEVICE void add_elements(const Operand& from, const ThreadCoord<Traits>& at, const Part& part,
                                  const Chunk& chunk, float (&to)[kCount]) {
  const auto typed = [&](auto type) {
    const auto data = from.data.as<const decltype(type)>();
    for_each_vote<kCount>(from, at, part, chunk.first, chunk.valid, [&](int n, int64_t m) {
      to[n] += static_cast<float>(widened(data[m]));
    });
  };
  switch (from.storage) {
    case Storage::f32:
      return typed(float{});
    case Storage::f64:
      return typed(double{});
    case Storage::bf16:
      return typed(BFloat16{});
    case Storage::f16:
      return typed(Float16{});
  }
}

// Votes that are not valid may hold anything, even NaN: this makes them 0.
template <int kElements, int kCount>
CAPSFAST_DEVICE void clear_invalid(const Chunk& chunk, Vector<kElements> (&votes)[kCount]) {
  if (chunk.valid == (1u << kCount) - 1) return;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if (!(chunk.valid >> n & 1)) votes[n] = {};
  }
}

// Makes the logits of votes that are not valid -inf.
template <int kCount>
CAPSFAST_DEVICE void exclude_invalid(const Chunk& chunk, float (&b)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) b[n] = chunk.valid >> n & 1 ? b[n] : -Extreme<float>::infinity;
}

}  // namespace capsfast::cuda
