// Reading votes, from a block's shared memory or from device memory, and writing dvotes.
#pragma once

#include "given_join.h"

namespace capsfast::cuda {

// Calls f(n, unit) for the units of this thread's numbers of a vote, in the thread's order (Spot::unit). The vote
// begins at element `vote` of `from`, its components are `step` apart. numbers: read number by number, else unit by
// unit.
template <class Tr, class F>
CAPSFAST_DEVICE void read_units(const Global<const typename Tr::Type>& from, int64_t vote, int64_t step, bool numbers,
                                const Spot<Tr>& at, const F& f) {
#pragma unroll
  for (int n = 0; n < Tr::units; ++n) {
    const int64_t element = vote + (at.from + at.unit(n) * Tr::unit) * step;
    typename Tr::Unit unit;
    if (numbers) {
#pragma unroll
      for (int k = 0; k < Tr::unit; ++k) unit.value[k] = from[element + k * step];
    } else {
      unit = from.template vector<typename Tr::Unit>(element);
    }
    f(n, unit);
  }
}

// Stores a unit as the n-th of this thread's numbers.
template <class Tr>
CAPSFAST_DEVICE void set_unit(int n, const typename Tr::Unit& unit, typename Tr::Numbers* to) {
#pragma unroll
  for (int k = 0; k < Tr::unit; ++k) to->value[n * Tr::unit + k] = wide(unit.value[k]);
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

// The plan of a resident kernel, as the kernel gets it.
struct Resident {
  GivenShape shape;
  GivenMemory memory;
  Access access;
  int capsules;  // input capsules of a block
  int stage;     // input capsules of a stage, a multiple of those of a chunk
  int together;  // iterations of the last pass whose softmaxes share barriers
};

// A Source (given_passes.h): votes in shared memory. They are copied there in stages, and the first pass waits for each
// stage when it gets there.
template <class Tr>
class SharedVotes {
  using E = typename Tr::Type;
  using Copies = gpu::Copies<GivenSize::stages>;

 public:
  // Starts the copies. All threads of the block call it when none reads the votes of the sample before any more.
  // before: how many samples the block has had.
  CAPSFAST_DEVICE SharedVotes(const Inputs& in, const Spot<Tr>& at, const Part& part, const Resident& resident,
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
      read_units(from, start + capsule * stride[1] + at.j * stride[2], stride[3], resident.access == Access::numbers,
                 at, [&](int n, const typename Tr::Unit& unit) {
                   to[(capsule * capsule_ + vote_ + at.from) / Tr::unit + at.unit(n)] = unit;
                 });
    }
    gpu::barrier();
  }

  template <int kCount>
  CAPSFAST_DEVICE void fetch(const Spot<Tr>& at, const Chunk& chunk, typename Tr::Numbers (&votes)[kCount]) {
    if (next_ < GivenSize::stages && chunk.first >= next_ * stage_) copies_.wait(next_++);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      // A thread without a capsule reads the last one, whose votes it does not use.
      const int vote = least(chunk.first + at.row + n * at.rows, last_) * capsule_ + vote_ + at.from;
#pragma unroll
      for (int k = 0; k < Tr::units; ++k)
        set_unit<Tr>(k, votes_.template vector<typename Tr::Unit>(vote + at.unit(k) * Tr::unit), &votes[n]);
    }
  }

 private:
  static CAPSFAST_DEVICE int least(int a, int b) { return a < b ? a : b; }

  Copies copies_;
  int capsule_, vote_, last_, stage_, next_ = 0;
  Shared<E> votes_;
};

// A Source (given_passes.h): votes in device memory, read where they are used.
template <class Tr>
class MemoryVotes {
 public:
  CAPSFAST_DEVICE MemoryVotes(const Inputs& in, const Spot<Tr>& at, const Part& part, Access access)
      : votes_(in.matrix.data.template as<const typename Tr::Type>()),
        start_(part.b * in.matrix.stride[0] + part.begin * in.matrix.stride[1] + at.j * in.matrix.stride[2]),
        capsule_(in.matrix.stride[1]),
        number_(in.matrix.stride[3]),
        last_(part.count - 1),
        numbers_(access == Access::numbers) {}

  template <int kCount>
  CAPSFAST_DEVICE void fetch(const Spot<Tr>& at, const Chunk& chunk, typename Tr::Numbers (&votes)[kCount]) const {
    // One branch around all loads of a chunk instead of one for each load, so that they are under way together.
    numbers_ ? fetch_as(at, chunk, true, votes) : fetch_as(at, chunk, false, votes);
  }

 private:
  template <int kCount>
  CAPSFAST_DEVICE void fetch_as(const Spot<Tr>& at, const Chunk& chunk, bool numbers,
                                typename Tr::Numbers (&votes)[kCount]) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int here = chunk.first + at.row + n * at.rows, capsule = here < last_ ? here : last_;
      read_units(votes_, start_ + capsule * capsule_, number_, numbers, at,
                 [&](int k, const typename Tr::Unit& unit) { set_unit<Tr>(k, unit, &votes[n]); });
    }
  }

  Global<const typename Tr::Type> votes_;
  int64_t start_, capsule_, number_;
  int last_;
  bool numbers_;
};

}  // namespace capsfast::cuda
