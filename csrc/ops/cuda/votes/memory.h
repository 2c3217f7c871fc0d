// Reading votes and vectors of the output capsules from a block's shared memory, and writing dvotes.
#pragma once

#include "layout.h"

namespace capsfast::cuda {

// This thread's components of a vector of its output capsule: vector `vector` + j of `from`, an array of vectors [D]. 0
// if the thread has no vote.
template <class Traits>
CAPSFAST_DEVICE typename Traits::Elements read_vector(const ThreadCoord<Traits>& at, const Inputs& in,
                                                      const Shared<Quad>& from, int vector) {
  typename Traits::Elements to = {};
  if (!at.mine) return to;
#pragma unroll
  for (int n = 0; n < Traits::Elements::quads; ++n)
    to.set_quad(n, from.vector<Quad>((vector + at.j) * (static_cast<int>(in.D) / VotesSize::few) + at.quad(n)));
  return to;
}

// Writes the `units` of this thread, which begin at unit `first` of `to`. All lanes of a warp call it; `mine` says
// whether this one has something to write.
//
// Device memory takes 32 bytes, two units, at once. So two neighbouring lanes write a pair of units together, one unit
// each: first a pair of the even lane, then one of the odd lane.
template <class Traits>
CAPSFAST_DEVICE void write_pairs(const Global<typename Traits::Unit>& to, const ThreadCoord<Traits>& at, bool mine,
                                 int64_t first, const typename Traits::Unit (&units)[Traits::units]) {
  constexpr int kWords = sizeof(typename Traits::Unit) / 4;
  const bool odd = gpu::thread() % 2 != 0, theirs = gpu::shuffle_xor(static_cast<int>(mine), 1) != 0;
  const int64_t other = gpu::shuffle_xor(static_cast<long long>(first), 1);
  // Both neighbours have the same turn. If it is even, the lower unit of a pair is the first in this thread's order.
  const bool swapped = odd != (at.turn % 2 != 0);
#pragma unroll
  for (int n = 0; n < Traits::units; n += 2) {
    uint32_t words[2][kWords];
    __builtin_memcpy(words, &units[n], sizeof(words));
    uint32_t kept[kWords], got[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      kept[k] = swapped ? words[1][k] : words[0][k];
      got[k] = gpu::shuffle_xor(swapped ? words[0][k] : words[1][k], 1);
    }
    // The unit that this lane writes of the even lane's pair is in `lower`, that of the odd lane's pair in `upper`.
    uint32_t upper[kWords], lower[kWords];
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      lower[k] = odd ? got[k] : kept[k];
      upper[k] = odd ? kept[k] : got[k];
    }
    const int64_t half = (at.unit(n) & ~1) + (odd ? 1 : 0);
    typename Traits::Unit unit;
    __builtin_memcpy(&unit, lower, sizeof(unit));
    if (odd ? theirs : mine) to[(odd ? other : first) + half] = unit;
    __builtin_memcpy(&unit, upper, sizeof(unit));
    if (odd ? mine : theirs) to[(odd ? first : other) + half] = unit;
  }
}

// Writes the gradients of a chunk of votes to dvotes [B, I, J, D], which is contiguous.
template <int kCount, class Traits>
CAPSFAST_DEVICE void write_votes(const Operand& to, const ThreadCoord<Traits>& at, const Part& part, const Chunk& chunk,
                                 const typename Traits::Elements (&votes)[kCount]) {
  const auto data = to.data.template as<typename Traits::Unit>();
  for_each_vote<kCount>(to, at, part, chunk.first, ~0u, [&](int n, int64_t m) {
    typename Traits::Unit units[Traits::units];
#pragma unroll
    for (int k = 0; k < Traits::elements; ++k)
      narrow(votes[n].value[k], &units[k / Traits::unit].value[k % Traits::unit]);
    const bool mine = chunk.inside >> n & 1;
    const int64_t first = (m + at.from) / Traits::unit;
    if constexpr (Traits::units > 1) {
      write_pairs(data, at, mine, first, units);
    } else {
      if (mine) data[first] = units[0];
    }
  });
}

// The votes of a block in its shared memory. They are copied there in stages, and the first pass waits for each stage
// when it gets there.
template <class Traits>
class SharedVotes {
  using E = typename Traits::Type;
  using Copies = gpu::Copies<VotesSize::stages>;

 public:
  // Starts the copies. All threads of the block call it when none reads the votes of the sample before any more.
  // before: how many samples the block has had.
  CAPSFAST_DEVICE SharedVotes(const Inputs& in, const ThreadCoord<Traits>& at, const Part& part, const VotesPlan& plan,
                              int before)
      : copies_(plan.memory.copies + Copies::bytes * before),
        capsule_(static_cast<int>(in.J * in.D)),
        vote_(static_cast<int>(at.j * in.D)),
        last_(part.count - 1),
        stage_(plan.stage),
        votes_(gpu::shared<E>(0, part.count * capsule_)) {
    const Global<const E> from = in.matrix.data.template as<const E>();
    const int64_t* stride = in.matrix.stride;
    const int64_t start = part.b * stride[0] + part.begin * stride[1];
    if (plan.access == Access::runs) {
      for (int n = 0; n < VotesSize::stages; ++n) {
        const int begin = least(n * stage_, part.count), end = least((n + 1) * stage_, part.count);
        copies_.start(n, votes_, begin * capsule_, from, start + begin * stride[1], (end - begin) * capsule_);
      }
      return;
    }
    next_ = VotesSize::stages;  // there is no copy to wait for
    const Shared<typename Traits::Unit> to =
        gpu::shared<typename Traits::Unit>(0, part.count * capsule_ / Traits::unit);
    for (int capsule = at.row; capsule < part.count && at.mine; capsule += at.rows) {
      const int64_t vote = start + capsule * stride[1] + at.j * stride[2];
#pragma unroll
      for (int n = 0; n < Traits::units; ++n) {
        const int64_t element = vote + (at.from + at.unit(n) * Traits::unit) * stride[3];
        typename Traits::Unit unit;
        if (plan.access == Access::elements) {
#pragma unroll
          for (int k = 0; k < Traits::unit; ++k) unit.value[k] = from[element + k * stride[3]];
        } else {
          unit = from.template vector<typename Traits::Unit>(element);
        }
        to[(capsule * capsule_ + vote_ + at.from) / Traits::unit + at.unit(n)] = unit;
      }
    }
    gpu::barrier();
  }

  // Reads this thread's components of the votes of a chunk.
  template <int kCount>
  CAPSFAST_DEVICE void fetch(const ThreadCoord<Traits>& at, const Chunk& chunk,
                             typename Traits::Elements (&votes)[kCount]) {
    if (next_ < VotesSize::stages && chunk.first >= next_ * stage_) copies_.wait(next_++);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      // A thread without a capsule reads the last one, whose votes it does not use.
      const int vote = least(chunk.first + at.row + n * at.rows, last_) * capsule_ + vote_ + at.from;
#pragma unroll
      for (int k = 0; k < Traits::units; ++k) {
        const auto unit = votes_.template vector<typename Traits::Unit>(vote + at.unit(k) * Traits::unit);
#pragma unroll
        for (int e = 0; e < Traits::unit; ++e) votes[n].value[k * Traits::unit + e] = widened(unit.value[e]);
      }
    }
  }

 private:
  static CAPSFAST_DEVICE int least(int a, int b) { return a < b ? a : b; }

  Copies copies_;
  int capsule_, vote_, last_, stage_, next_ = 0;
  Shared<E> votes_;
};

}  // namespace capsfast::cuda
