// Reading votes and vectors of the output capsules from a block's shared memory, and writing dvotes.
#pragma once

#include "given_layout.h"
#include "given_rows.h"

namespace capsfast::cuda {

// This thread's components (Spot) of `from`, a vector [J, D] for each output capsule; `vector` is the number of output
// capsules before it. 0 for a thread without a place.
template <class Tr>
CAPSFAST_DEVICE typename Tr::Numbers read_vector(const Spot<Tr>& at, const Inputs& in, const Shared<Four>& from,
                                                 int vector) {
  typename Tr::Numbers to = {};
  if (!at.mine) return to;
#pragma unroll
  for (int n = 0; n < Tr::Numbers::fours; ++n)
    to.set_four(n, from.vector<Four>((vector + at.j) * (static_cast<int>(in.D) / GivenSize::few) + at.four(n)));
  return to;
}

// Writes the `units` of this thread, which begin at unit `first` of `to`. All lanes of a warp call it; `mine` says
// whether this one has something to write.
//
// Device memory takes 32 bytes, two units, at once. So two neighbouring lanes write a pair of units together, one unit
// each: first a pair of the even lane, then one of the odd lane.
template <class Tr>
CAPSFAST_DEVICE void write_pairs(const Global<typename Tr::Unit>& to, const Spot<Tr>& at, bool mine, int64_t first,
                                 const typename Tr::Unit (&units)[Tr::units]) {
  constexpr int kWords = sizeof(typename Tr::Unit) / 4;
  const bool odd = gpu::thread() % 2 != 0, theirs = gpu::shuffle_xor(static_cast<int>(mine), 1) != 0;
  const int64_t other = gpu::shuffle_xor(static_cast<long long>(first), 1);
  // Both neighbours have the same turn. If it is even, the lower unit of a pair is the first in this thread's order.
  const bool swapped = odd != (at.turn % 2 != 0);
#pragma unroll
  for (int n = 0; n < Tr::units; n += 2) {
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
    typename Tr::Unit unit;
    __builtin_memcpy(&unit, lower, sizeof(unit));
    if (odd ? theirs : mine) to[(odd ? other : first) + half] = unit;
    __builtin_memcpy(&unit, upper, sizeof(unit));
    if (odd ? mine : theirs) to[(odd ? first : other) + half] = unit;
  }
}

// Writes the gradients of a chunk of votes to dvotes [B, I, J, D], which is contiguous.
template <int kCount, class Tr>
CAPSFAST_DEVICE void write_votes(const Operand& to, const Spot<Tr>& at, const Part& part, const Chunk& chunk,
                                 const typename Tr::Numbers (&votes)[kCount]) {
  const auto data = to.data.template as<typename Tr::Unit>();
  each_element<kCount>(to, at, part, chunk.first, ~0u, [&](int n, int64_t m) {
    typename Tr::Unit units[Tr::units];
#pragma unroll
    for (int k = 0; k < Tr::numbers; ++k) narrow(votes[n].value[k], &units[k / Tr::unit].value[k % Tr::unit]);
    const bool mine = chunk.inside >> n & 1;
    const int64_t first = (m + at.from) / Tr::unit;
    if constexpr (Tr::units > 1) {
      write_pairs(data, at, mine, first, units);
    } else {
      if (mine) data[first] = units[0];
    }
  });
}

// The votes of a block in its shared memory. They are copied there in stages, and the first pass waits for each stage
// when it gets there.
template <class Tr>
class SharedVotes {
  using E = typename Tr::Type;
  using Copies = gpu::Copies<GivenSize::stages>;

 public:
  // Starts the copies. All threads of the block call it when none reads the votes of the sample before any more.
  // before: how many samples the block has had.
  CAPSFAST_DEVICE SharedVotes(const Inputs& in, const Spot<Tr>& at, const Part& part, const ResidentPlan& resident,
                              int before)
      : copies_(resident.memory.copies + Copies::bytes * before),
        capsule_(static_cast<int>(in.J * in.D)),
        vote_(static_cast<int>(at.j * in.D)),
        last_(part.count - 1),
        stage_(resident.stage),
        votes_(gpu::shared<E>(0, part.count * capsule_)) {
    const Global<const E> from = in.matrix.data.template as<const E>();
    const int64_t* stride = in.matrix.stride;
    const int64_t start = part.b * stride[0] + part.begin * stride[1];
    if (resident.access == Access::runs) {
      for (int n = 0; n < GivenSize::stages; ++n) {
        const int begin = least(n * stage_, part.count), end = least((n + 1) * stage_, part.count);
        copies_.start(n, votes_, begin * capsule_, from, start + begin * stride[1], (end - begin) * capsule_);
      }
      return;
    }
    next_ = GivenSize::stages;  // there is no copy to wait for
    const Shared<typename Tr::Unit> to = gpu::shared<typename Tr::Unit>(0, part.count * capsule_ / Tr::unit);
    for (int capsule = at.row; capsule < part.count && at.mine; capsule += at.rows) {
      const int64_t vote = start + capsule * stride[1] + at.j * stride[2];
#pragma unroll
      for (int n = 0; n < Tr::units; ++n) {
        const int64_t element = vote + (at.from + at.unit(n) * Tr::unit) * stride[3];
        typename Tr::Unit unit;
        if (resident.access == Access::numbers) {
#pragma unroll
          for (int k = 0; k < Tr::unit; ++k) unit.value[k] = from[element + k * stride[3]];
        } else {
          unit = from.template vector<typename Tr::Unit>(element);
        }
        to[(capsule * capsule_ + vote_ + at.from) / Tr::unit + at.unit(n)] = unit;
      }
    }
    gpu::barrier();
  }

  // Reads this thread's components of the votes of a chunk.
  template <int kCount>
  CAPSFAST_DEVICE void fetch(const Spot<Tr>& at, const Chunk& chunk, typename Tr::Numbers (&votes)[kCount]) {
    if (next_ < GivenSize::stages && chunk.first >= next_ * stage_) copies_.wait(next_++);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      // A thread without a capsule reads the last one, whose votes it does not use.
      const int vote = least(chunk.first + at.row + n * at.rows, last_) * capsule_ + vote_ + at.from;
#pragma unroll
      for (int k = 0; k < Tr::units; ++k) {
        const auto unit = votes_.template vector<typename Tr::Unit>(vote + at.unit(k) * Tr::unit);
#pragma unroll
        for (int e = 0; e < Tr::unit; ++e) votes[n].value[k * Tr::unit + e] = wide(unit.value[e]);
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
