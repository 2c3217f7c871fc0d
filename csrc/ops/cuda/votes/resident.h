// How a block of the votes family holds the votes of some input capsules of a sample: all votes in shared memory, one
// row at a time in registers.
//
// A row is the votes of an input capsule. A lane has kElements neighbouring components of a vote, so a row takes J D /
// kElements lanes. A warp has as many whole rows at a time as fit its lanes, so the softmax over the output capsules
// stays within a warp.
#pragma once

#include <cmath>

#include "../warp.h"

namespace capsfast::cuda::votes {

// How a sample is cut, chosen by launch.h.
struct Cut {
  int cluster;   // blocks that share a sample
  int capsules;  // input capsules of a block, at most
  int threads;
  bool pieces;  // votes are contiguous in each input capsule, and may be copied in pieces of 16 bytes
};

// What a kernel is compiled for: the type of the votes, and how many components of a vote a lane has.
template <class E, int kElements>
struct Traits {
  using Type = E;
  static constexpr int elements = kElements;
  static constexpr int piece = 16 / static_cast<int>(sizeof(E)), pieces = kElements / piece;
  using Piece = Run<E, piece>;
  using Elements = float[kElements];
};

template <class Tr>
CAPSFAST_HOST_DEVICE int rows_of_warp(const Inputs& in) {
  return 32 / static_cast<int>(in.J * in.D / Tr::elements);
}

// A thread's place: components from d on of output capsule j, in row `row` of the block and then in every `rows`-th
// row. Lanes that are left over (`mine` is false) repeat the work of others, so that they can take part in shuffles,
// and write nothing.
template <class Tr>
struct ThreadCoord {
  int j, d, row, rows;
  int lanes, segment;    // of a vote; of a row
  int place, end, step;  // in the row; the lane after its last; lanes from j to j + 1, or 0 if not `mine`
  int first;             // row of the warp's first row
  bool mine;

  CAPSFAST_DEVICE explicit ThreadCoord(const Inputs& in)
      : lanes(static_cast<int>(in.D) / Tr::elements), segment(static_cast<int>(in.J) * lanes) {
    const int lane = gpu::thread() % 32, in_warp = rows_of_warp<Tr>(in), part = lane / segment;
    mine = part < in_warp;
    place = lane - part * segment;
    j = place / lanes;
    d = place % lanes * Tr::elements;
    end = mine ? (part + 1) * segment : 32;
    step = mine ? lanes : 0;
    first = gpu::thread() / 32 * in_warp;
    row = first + (mine ? part : 0);
    rows = gpu::threads() / 32 * in_warp;
  }

  // Whether this lane writes numbers that a vote has once, such as its coupling coefficient.
  CAPSFAST_DEVICE bool leads() const { return mine && d == 0; }
};

// Where shared memory keeps piece n (16 bytes) of a lane's part of a row, as an index of pieces; lane = row * segment +
// place. Neighbouring lanes read their n-th pieces at the same time. If all lanes had the same order, the pieces would
// be in the same banks.
template <int kPieces>
CAPSFAST_DEVICE int turned(int lane, int n) {
  return lane * kPieces + (n ^ (lane * kPieces / 8 % kPieces));
}

// Votes [count, J, D] in the block's shared memory, from byte 0 on. A warp copies its own rows; no other warp reads
// these rows.
template <class Tr>
class ResidentVotes {
  using E = typename Tr::Type;
  using Piece = typename Tr::Piece;

 public:
  CAPSFAST_DEVICE ResidentVotes(const Inputs& inputs, const ThreadCoord<Tr>& coord, int capsules)
      : in(inputs), at(coord), count(capsules), memory_(gpu::shared<E>(0, count * at.segment * Tr::elements)) {}

  // Copies input capsules [begin, begin + count) of sample b. Votes of masked input capsules become 0, even if they
  // hold NaN.
  CAPSFAST_DEVICE void copy(const Cut& cut, int64_t b, int64_t begin) const {
    const Operand& from = in.matrix;
    const int D = static_cast<int>(in.D);
    for_pieces(begin, [&](int64_t i, int n, int to) {
      const int64_t capsule = b * from.stride[0] + i * from.stride[1];
      const bool valid = in.mask.at(b, i);
      if (valid && cut.pieces) {
        gpu::copy_ahead(memory_, to, from.data.template as<const E>(), capsule + n);
        return;
      }
      Piece piece = {};
#pragma unroll
      for (int k = 0; k < Tr::piece && valid; ++k)
        piece.value[k] =
            from.data.template as<const E>()[capsule + (n + k) / D * from.stride[2] + (n + k) % D * from.stride[3]];
      memory_.write(to, piece);
    });
    gpu::copies_wait();
    gpu::warp_barrier();
  }

  // This lane's components of the votes of a row, or 0 if the row is not `mine`.
  CAPSFAST_DEVICE void read(int row, bool mine, typename Tr::Elements& votes) const {
#pragma unroll
    for (int n = 0; n < Tr::pieces; ++n) {
      Piece piece = {};
      if (mine) piece = memory_.template vector<Piece>(place_of(row * at.segment + at.place, n));
#pragma unroll
      for (int k = 0; k < Tr::piece; ++k) votes[n * Tr::piece + k] = widened(piece.value[k]);
    }
  }
  // Overwrites these components.
  CAPSFAST_DEVICE void write(int row, const typename Tr::Elements& votes) const {
#pragma unroll
    for (int n = 0; n < Tr::pieces; ++n) {
      Piece piece;
#pragma unroll
      for (int k = 0; k < Tr::piece; ++k) narrow(votes[n * Tr::piece + k], &piece.value[k]);
      memory_.write(place_of(row * at.segment + at.place, n), piece);
    }
  }

  // Copies everything to a contiguous tensor [B, I, J, D]. Unlike in write(), pieces of neighbouring lanes are
  // neighbours.
  CAPSFAST_DEVICE void copy_out(const Operand& to, int64_t b, int64_t begin) const {
    gpu::warp_barrier();
    for_pieces(begin, [&](int64_t i, int n, int from) {
      const int64_t element = (b * in.I + i) * in.J * in.D + n;
      to.data.template as<Piece>()[element / Tr::piece] = memory_.template vector<Piece>(from);
    });
  }

  const Inputs& in;
  const ThreadCoord<Tr>& at;
  const int count;

 private:
  // Calls f(i, n, place) for this lane's share of the pieces of the warp's rows: elements from n on of input capsule i.
  template <class F>
  CAPSFAST_DEVICE void for_pieces(int64_t begin, const F& f) const {
    for (int row = at.row; row < count && at.mine; row += at.rows) {
#pragma unroll
      for (int m = 0; m < Tr::pieces; ++m) {
        const int n = m * at.segment + at.place;
        f(begin + row, n * Tr::piece, place_of(row * at.segment + n / Tr::pieces, n % Tr::pieces));
      }
    }
  }

  static CAPSFAST_DEVICE int place_of(int lane, int n) { return turned<Tr::pieces>(lane, n) * Tr::piece; }

  const Shared<E> memory_;
};

using Four = Run<float, 4>;

// This lane's components of the vector of its output capsule in sample b, from vectors [B, J, D]; 0 if absent.
template <class Tr>
CAPSFAST_DEVICE void read_vector(const Inputs& in, const ThreadCoord<Tr>& at, const Global<const float>& vectors,
                                 int64_t b, typename Tr::Elements& to) {
  const int64_t from = (b * in.J + at.j) * in.D + at.d;
#pragma unroll
  for (int n = 0; n < Tr::elements; n += 4) {
    const Four x = vectors ? vectors.template vector<Four>(from + n) : Four{};
#pragma unroll
    for (int k = 0; k < 4; ++k) to[n + k] = x.value[k];
  }
}

// Vectors [J, D] in shared memory, for kernels that read them for every row.
template <class Tr>
struct StagedVectors {
  static constexpr int pieces = Tr::elements / 4;
  Shared<float> memory;
  int vectors;  // J D

  // Vector n = the vector of sample b in `from`, or 0.
  CAPSFAST_DEVICE void stage(int n, const Global<const float>& from, int64_t b) const {
    for (int m = gpu::thread(); m < vectors / 4; m += gpu::threads())
      memory.write(n * vectors + 4 * turned<pieces>(m / pieces, m % pieces),
                   from ? from.template vector<Four>(b * vectors + 4 * m) : Four{});
  }
  CAPSFAST_DEVICE void read(int n, const ThreadCoord<Tr>& at, typename Tr::Elements& to) const {
#pragma unroll
    for (int m = 0; m < pieces; ++m) {
      const Four x = memory.template vector<Four>(n * vectors + 4 * turned<pieces>(at.place, m));
#pragma unroll
      for (int k = 0; k < 4; ++k) to[4 * m + k] = x.value[k];
    }
  }
};

}  // namespace capsfast::cuda::votes
