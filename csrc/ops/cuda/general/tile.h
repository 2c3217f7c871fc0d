// The part of the work that a block of the general kernels does at a time: votes, computed where they are used, and
// routing logits in shared memory, with their softmax and its backward.
#pragma once

#include <cstdint>

#include "../../../math/softmax.h"
#include "../warp.h"

namespace capsfast::cuda {

// How many blocks a multiprocessor must hold. Few, so that no thread spills registers.
template <class T>
constexpr int kBlocksFor = sizeof(T) == 8 ? 2 : 3;

// Sizes of a tile in the accumulating pass.
template <class T>
struct AccumulateTile {
  static constexpr int inputs = 8;                          // this many votes are added in T, then in double
  static constexpr int outputs = sizeof(T) == 8 ? 32 : 64;  // logits and dc take 32 KiB
};

// Sizes of a tile in the gradient pass.
template <class T>
struct GradientTile {
  static constexpr int inputs = 2;  // few, so that there are more blocks
  static constexpr int outputs = AccumulateTile<T>::outputs;
  static constexpr int rows = sizeof(T) == 8 ? 128 : 256;  // (j, d) of votes: their gradients take 16 KiB
  static constexpr int columns = 64;                       // components k of u at a time

  // How many output capsules a tile has, and how many of their components.
  static CAPSFAST_HOST_DEVICE int64_t outputs_for(int64_t J, int64_t D) {
    return clamped(rows / clamped(D, rows), clamped(J, outputs));
  }
  static CAPSFAST_HOST_DEVICE int64_t components_for(int64_t D) { return clamped(D, rows); }

 private:
  static CAPSFAST_HOST_DEVICE int64_t clamped(int64_t n, int64_t most) { return n < 1 ? 1 : n < most ? n : most; }
};

constexpr int kSamples = 8;  // of every tile: a weight is read once for all

CAPSFAST_DEVICE int at_most(int64_t rest, int64_t most) { return static_cast<int>(rest < most ? rest : most); }

// Calls f(row, column) for every element of a matrix, each on one thread of the block: the same thread in every call.
template <class N, class F>
CAPSFAST_DEVICE void for_each(int rows, N width, const F& f) {
  for (N n = gpu::thread(); n < rows * width; n += gpu::threads()) f(static_cast<int>(n / width), n % width);
}

// Calls f(n) for the bits n that are set. f may use n as an index into registers.
template <class F>
CAPSFAST_DEVICE void for_samples(unsigned which, const F& f) {
#pragma unroll
  for (int n = 0; n < kSamples; ++n) {
    if (which >> n & 1) f(n);
  }
}

// Samples [b0, b0 + samples), input capsules [i0, i0 + inputs) and output capsules [j0, j0 + outputs). E is the element
// type of u, weight and votes. kVotes: the votes are an input.
template <class T, class E, bool kVotes, class Size>
struct Tile {
  static constexpr int pairs = Size::inputs * kSamples, scores = pairs * Size::outputs;
  static constexpr int elements = 2 * scores + 3 * pairs;  // of shared memory

  const Inputs& in;
  int64_t b0 = 0, i0 = 0, j0 = 0;
  int samples = 0, inputs = 0, outputs = 0;
  // [pairs][outputs], pair = input * kSamples + sample: logits, then c; in the backward dc, then db.
  Shared<T> c = array(0, scores), dc = array(scores, scores);
  // [pairs]: the normaliser of the softmax over the output capsules.
  Shared<T> max = array(2 * scores, pairs), scale = array(2 * scores + pairs, pairs),
            mean = array(2 * scores + 2 * pairs, pairs);

  // `count` elements of shared memory from element `from` on. Elements up to `elements` belong to the tile.
  static CAPSFAST_DEVICE Shared<T> array(int from, int count) {
    return gpu::shared<T>(from * static_cast<int>(sizeof(T)), count);
  }

  // Limits the tile to samples, input and output capsules that exist.
  CAPSFAST_DEVICE void fit(int64_t i_end, int64_t most_outputs) {
    samples = at_most(in.B - b0, kSamples);
    inputs = at_most(i_end - i0, Size::inputs);
    outputs = at_most(in.J - j0, most_outputs);
  }

  CAPSFAST_DEVICE int index(int input, int n, int out) const { return (input * kSamples + n) * Size::outputs + out; }
  CAPSFAST_DEVICE int64_t sample_of(int pair) const { return b0 + pair % kSamples; }
  CAPSFAST_DEVICE int64_t input_of(int pair) const { return i0 + pair / kSamples; }

  // Calls f(pair, n), n < width, for every pair; see for_each.
  template <class F>
  CAPSFAST_DEVICE void for_pairs(int width, const F& f) const {
    for_each(inputs * kSamples, width, [&](int pair, int n) {
      if (pair % kSamples < samples) f(pair, n);
    });
  }

  CAPSFAST_DEVICE unsigned all_samples() const { return (1u << samples) - 1; }
  // The samples, as bits, whose input capsule i is not masked.
  CAPSFAST_DEVICE unsigned valid_samples(int64_t i) const {
    unsigned valid = all_samples();
    for (int n = 0; n < samples && in.mask.data; ++n) valid -= in.mask.at(b0 + n, i) ? 0u : 1u << n;
    return valid;
  }

  // votes[n] = component d of the vote of input capsule i for output capsule j, in sample b0 + n. Component D, for the
  // mass, is 1. Other components are 0 if bit n of `valid` is not set, even if inputs hold NaN.
  CAPSFAST_DEVICE void make_votes(unsigned valid, int64_t i, int64_t j, int64_t d, T (&votes)[kSamples]) const {
    for_samples(~0u, [&](int n) { votes[n] = d < in.D ? T(0) : T(1); });
    if (d == in.D || valid == 0) return;
    const Global<const E> matrix = in.matrix.data.template as<const E>();
    if constexpr (kVotes) {
      for_samples(valid, [&](int n) { votes[n] = T(matrix[in.matrix.at(b0 + n, i, j, d)]); });
    } else {
      const Global<const E> u = in.u.data.template as<const E>();
      const int64_t row = in.matrix.at(i, j, d), capsule = in.u.at(b0, i);
      for (int64_t k = 0; k < in.K; ++k) {
        const T w = T(matrix[row + k * in.matrix.stride[3]]);
        for_samples(valid, [&](int n) { votes[n] += w * T(u[capsule + n * in.u.stride[0] + k * in.u.stride[2]]); });
      }
    }
  }

  // Writes votes . V + logits + prior, or -inf for masked entries, to c. If there is ds, also writes votes . ds +
  // dcoupling + dmass to dc. Must be called after a barrier, and ends with a barrier.
  CAPSFAST_DEVICE void score(const Scoring<T>& with) const {
    const int lanes = lanes_for(in.D), warps = (inputs * outputs * lanes + 31) / 32;
    // A unit is a pair of input and output capsule, on neighbouring lanes. There may be more units than pairs, because
    // all lanes of a warp must take part in every shuffle.
    for_each(warps * 32 / lanes, lanes, [&](int unit, int lane) {
      const int input = unit / outputs, out = unit % outputs;
      const int64_t i = i0 + input, j = j0 + out;
      const unsigned valid = input < inputs ? valid_samples(i) : 0;
      T by_V[kSamples] = {}, by_ds[kSamples] = {};
      for (int64_t d = lane; d < in.D && valid != 0 && (with.V || with.ds); d += lanes) {
        T votes[kSamples];
        make_votes(valid, i, j, d, votes);
        for_samples(valid, [&](int n) {
          const int64_t element = ((b0 + n) * in.J + j) * in.D + d;
          if (with.V) by_V[n] += votes[n] * with.V[element];
          if (with.ds) by_ds[n] += votes[n] * with.ds[element];
        });
      }
      for_samples(~0u, [&](int n) {
        if (with.V) by_V[n] = lane_sum(by_V[n], lanes);
        if (with.ds) by_ds[n] = lane_sum(by_ds[n], lanes);
      });
      if (lane != 0 || input >= inputs) return;
      for_samples(all_samples(), [&](int n) {
        const int64_t b = b0 + n;
        const bool counts = (valid >> n & 1) && in.out_mask.at(b, j);
        if (counts) {
          in.logits.add_to(&by_V[n], b, i, j);
          in.prior.add_to(&by_V[n], b, j);
          with.dcoupling.add_to(&by_ds[n], b, i, j);
          with.dmass.add_to(&by_ds[n], b, j);
        }
        c[index(input, n, out)] = counts ? by_V[n] : -Extreme<T>::infinity;
        if (with.ds) dc[index(input, n, out)] = counts ? by_ds[n] : T(0);
      });
    });
    gpu::barrier();
  }

  // Adds the outputs of the tile to the normaliser of each pair. Before the last tile `scale` is the sum of exp(b -
  // max), and `mean` the sum of exp(b - max) dc. Ends with a barrier.
  CAPSFAST_DEVICE void add_to_normaliser(bool with_dc) const {
    constexpr int kLanes = 8;
    static_assert(kLanes * kSamples % 32 == 0, "all lanes of a warp take part in every shuffle");
    for_each(inputs * kSamples, kLanes, [&](int pair, int lane) {
      const bool exists = pair % kSamples < samples;
      const int row = pair * Size::outputs, end = exists ? row + outputs : row;
      // The leaky entry has logit 0, and its dc is 0.
      T before = in.leaky ? T(0) : Extreme<T>::lowest, total = in.leaky ? T(1) : T(0), total_dc = T(0);
      if (exists && j0 > 0) {
        before = max[pair];
        total = scale[pair];
        total_dc = mean[pair];
      }
      T m = before;
      for (int n = row + lane; n < end; n += kLanes) m = larger<T>(m, c[n]);
      for (int mask = kLanes / 2; mask > 0; mask /= 2) m = larger<T>(m, gpu::shuffle_xor(m, mask));
      T sum = T(0), sum_dc = T(0);
      for (int n = row + lane; n < end; n += kLanes) {
        const T e = std::exp(c[n] - m);
        sum += e;
        if (with_dc) sum_dc += e * dc[n];
      }
      sum = lane_sum(sum, kLanes);
      sum_dc = lane_sum(sum_dc, kLanes);
      gpu::warp_barrier();  // all lanes have read what is overwritten below
      if (!exists || lane != 0) return;
      const T factor = std::exp(before - m);
      total = total * factor + sum;
      const bool last = j0 + outputs == in.J;
      max[pair] = m;
      scale[pair] = last ? inverse(total) : total;
      mean[pair] = (total_dc * factor + sum_dc) * (last ? inverse(total) : T(1));
    });
    gpu::barrier();
  }

  // An element of the given normaliser or, if it is absent, of the normaliser that add_to_normaliser() made.
  CAPSFAST_DEVICE T norm(const Global<const T>& given, const Shared<T>& made, int pair, int out) const {
    if (!given) return made[pair];
    return given[in.softmax_in ? sample_of(pair) * in.J + j0 + out : sample_of(pair) * in.I + input_of(pair)];
  }

  // Turns the scores into c and, in the backward, db = c (dc - mean + dlse), and calls f(pair, out, n) for each score,
  // with index n. Without a given normaliser the tile has all output capsules. Ends with a barrier.
  template <class F>
  CAPSFAST_DEVICE void normalise(const Scoring<T>& with, const Normaliser<T>& given, const F& f) const {
    const bool with_dc = static_cast<bool>(with.ds);
    if (!given.max) add_to_normaliser(with_dc);
    for_pairs(outputs, [&](int pair, int out) {
      const int n = pair * Size::outputs + out;
      const T coupling = std::exp(c[n] - norm(given.max, max, pair, out)) * norm(given.scale, scale, pair, out);
      c[n] = coupling;
      if (with_dc) {
        T dlse = T(0);
        with.dlse.add_to(&dlse, sample_of(pair), in.softmax_in ? j0 + out : input_of(pair));
        const T divided = in.softmax_in && coupling > kWhole<T> ? T(0) : coupling;
        dc[n] = divided * (dc[n] - norm(given.mean, mean, pair, out)) + coupling * dlse;
      }
      f(pair, out, n);
    });
    gpu::barrier();
  }
};

}  // namespace capsfast::cuda
