// Which votes a thread works on.
#pragma once

#include "given_vector.h"

namespace capsfast::cuda {

// A thread's place among those that share votes (GivenShape): output capsule j of the input capsule of `row`, and some
// of the components. A block may have more threads than places. The others (`mine` is false) repeat the work of a
// thread that has one, so that they can take part in shuffles and barriers, and write nothing.
template <class Tr>
struct Spot {
  int lanes, rows, row, j;
  int segment, end, step;  // Exchange::warp: lanes of a row; the lane after its last; lanes from j to j + 1
  int from;                // the first of this thread's components
  int turn;                // see unit()
  bool mine;

  CAPSFAST_DEVICE Spot(const GivenShape& shape, const Inputs& in) : lanes(shape.lanes), rows(shape.rows) {
    const int J = static_cast<int>(in.J), last = static_cast<int>(in.D) / Tr::numbers - 1, thread = gpu::thread();
    segment = J * lanes;
    end = 32;
    step = 0;
    int lane = thread & (lanes - 1);  // `lanes` is a power of two
    if constexpr (Tr::exchange == Exchange::warp) {
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
    from = Tr::numbers * (lane < last ? lane : last);
    turn = thread * Tr::units / 8 % Tr::units;
  }

  // Whether this thread writes what a vote has one of, such as its score.
  CAPSFAST_DEVICE bool leads() const { return mine && from == 0; }
  // Which unit of its components the thread reads n-th. The order differs between lanes: if all read their n-th unit at
  // the same time, they would read the same banks of shared memory.
  CAPSFAST_DEVICE int unit(int n) const { return n ^ turn; }
  // Which group of four components of the output capsule this thread's n-th group is.
  CAPSFAST_DEVICE int four(int n) const {
    constexpr int kFours = Tr::unit / GivenSize::few;
    return from / GivenSize::few + unit(n / kFours) * kFours + n % kFours;
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
// `counts` is set if it exists and neither mask drops it. Bit n of `inside` is set if it exists and this thread writes
// its results.
struct Chunk {
  int first;
  unsigned inside, counts;
};

// valid: whether out_mask keeps the output capsule of this thread.
template <int kCount, class Tr>
CAPSFAST_DEVICE Chunk chunk_at(const Inputs& in, const Spot<Tr>& at, const Part& part, bool valid, int first) {
  unsigned there = (1u << kCount) - 1;
  if (first + kCount * at.rows > part.count) {
    there = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) there |= static_cast<unsigned>(first + at.row + n * at.rows < part.count) << n;
  }
  Chunk chunk{first, at.mine ? there : 0, valid ? there : 0};
  if (!in.mask.data || chunk.counts == 0) return chunk;
  const int64_t from = part.b * in.mask.stride[0] + (part.begin + first + at.row) * in.mask.stride[1],
                step = at.rows * in.mask.stride[1];
  int64_t element = from;
#pragma unroll
  for (int n = 0; n < kCount; ++n, element += step) {
    // Reads the mask of vote 0 for a vote that does not exist, so that the loads need no branch. If any vote exists,
    // vote 0 does.
    const bool masked = in.mask.data[chunk.counts >> n & 1 ? element : from] == 0;
    if (masked) chunk.counts &= ~(1u << n);
  }
  return chunk;
}

// to[n] = votes[n] . with, in all lanes of the vote.
template <int kCount, class Tr>
CAPSFAST_DEVICE void dots(const Spot<Tr>& at, const typename Tr::Numbers (&votes)[kCount],
                          const typename Tr::Numbers& with, float (&to)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) to[n] = product(votes[n], with);
  for (int mask = at.lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) to[n] += gpu::shuffle_xor(to[n], mask);
  }
}

// Calls f(n, m) for each vote n whose bit is set in `which`. m is its element of a tensor [B, I, J].
template <int kCount, class Tr, class F>
CAPSFAST_DEVICE void each_element(const Operand& of, const Spot<Tr>& at, const Part& part, int first, unsigned which,
                                  const F& f) {
  const int64_t step = at.rows * of.stride[1];
  int64_t element = part.b * of.stride[0] + (part.begin + first + at.row) * of.stride[1] + at.j * of.stride[2];
#pragma unroll
  for (int n = 0; n < kCount; ++n, element += step) {
    if (which >> n & 1) f(n, element);
  }
}

// to[n] += the element of `from` [B, I, J] for each vote n that counts. The type is looked at once for all of them.
template <int kCount, class Tr>
CAPSFAST_DEVICE void add_elements(const Operand& from, const Spot<Tr>& at, const Part& part, const Chunk& chunk,
                                  float (&to)[kCount]) {
  const auto typed = [&](auto type) {
    const auto data = from.data.as<const decltype(type)>();
    each_element<kCount>(from, at, part, chunk.first, chunk.counts, [&](int n, int64_t m) {
      to[n] += static_cast<float>(wide(data[m]));
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

// Votes that do not count may hold anything, even NaN. clear() makes them 0, exclude() makes their logits -inf.
template <int kNumbers, int kCount>
CAPSFAST_DEVICE void clear(const Chunk& chunk, Vector<kNumbers> (&votes)[kCount]) {
  if (chunk.counts == (1u << kCount) - 1) return;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if (!(chunk.counts >> n & 1)) votes[n] = {};
  }
}
template <int kCount>
CAPSFAST_DEVICE void exclude(const Chunk& chunk, float (&b)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) b[n] = chunk.counts >> n & 1 ? b[n] : -Extreme<float>::infinity;
}

}  // namespace capsfast::cuda
