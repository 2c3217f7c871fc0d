// Routing logits of a tile, their softmax, and the way back, in shared memory: what every pass has in common.
#pragma once

#include <cmath>
#include <cstdint>

#include "votes.h"

namespace capsfast::cuda {

using gpu::Shared;

// Lanes that share the dot product of one vote: the power of two that D fills, a warp at most.
CAPSFAST_DEVICE int lanes_for(int64_t D) {
  int lanes = 1;
  while (lanes < D && lanes < 32) lanes *= 2;
  return lanes;
}

template <class T>
CAPSFAST_DEVICE T lane_sum(T value, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) value += gpu::shuffle_xor(value, mask);
  return value;
}

template <class T>
CAPSFAST_DEVICE T larger(T a, T b) {
  return a > b ? a : b;
}

// What one iteration scores with. V: sum of the outputs so far [B, J, D], absent in the first iteration. ds: gradient
// of s_t [B, J, D], in the backward. dcoupling [B, I, J]: added to dc, in the last iteration.
template <class T>
struct Scoring {
  Global<const T> V, ds;
  Operand dcoupling;
};

// The normaliser of c = exp(b - max) scale, and mean = sum c dc. Of rows (a sample's input capsule) [B, I] for the
// softmax over the output capsules, absent where a block sees all of them; of columns [B, J] for the other.
template <class T>
struct Normaliser {
  Global<const T> max, scale, mean;
};

// logits[pair][j] and, with ds, dc[pair][j] for pair = input * kSamples + sample; rows of `pitch`.
template <class T, int kSamples>
struct Scores {
  Shared<T> logits, dc;
  int pitch;

  CAPSFAST_DEVICE int at(int input, int sample, int j) const { return (input * kSamples + sample) * pitch + j; }
};

// votes . V + logits (-inf where masked), and votes . ds + dcoupling.
template <class T, class E, bool kVotes, int kSamples>
CAPSFAST_DEVICE void score(const Inputs& in, const Tile& tile, const Scoring<T>& with, const Scores<T, kSamples>& to) {
  const int lanes = lanes_for(in.D), lane = gpu::thread() % lanes, groups = gpu::threads() / lanes;
  const int units = tile.inputs * tile.outputs;
  // Every group makes the same number of rounds, so that whole warps meet in the shuffles.
  for (int first = 0; first < units; first += groups) {
    const int unit = first + gpu::thread() / lanes;
    const bool mine = unit < units;
    const int input = mine ? unit / tile.outputs : 0, out = mine ? unit % tile.outputs : 0;
    const int64_t i = tile.i0 + input, j = tile.j0 + out;
    const unsigned valid = mine ? valid_samples(in, tile, i) : 0;
    T b[kSamples], dc[kSamples];
#pragma unroll
    for (int n = 0; n < kSamples; ++n) b[n] = dc[n] = T(0);
    if (with.V || with.ds) {
      for (int64_t d = lane; d < in.D && valid != 0; d += lanes) {
        T votes[kSamples];
        Votes<T, E, kVotes>::make(in, tile, valid, i, j, d, votes);
#pragma unroll
        for (int n = 0; n < kSamples; ++n) {
          if (!(valid >> n & 1)) continue;
          const int64_t element = ((tile.b0 + n) * in.J + j) * in.D + d;
          if (with.V) b[n] += votes[n] * with.V[element];
          if (with.ds) dc[n] += votes[n] * with.ds[element];
        }
      }
#pragma unroll
      for (int n = 0; n < kSamples; ++n) {
        if (with.V) b[n] = lane_sum(b[n], lanes);
        if (with.ds) dc[n] = lane_sum(dc[n], lanes);
      }
    }
    if (!mine || lane != 0) continue;
#pragma unroll
    for (int n = 0; n < kSamples; ++n) {
      if (n >= tile.samples) continue;
      const int64_t sample = tile.b0 + n;
      const bool counts = (valid >> n & 1) && in.out_mask.at(sample, j);
      if (counts && in.logits.data)
        b[n] += in.logits.template read<T>(
            sample * in.logits.stride[0] + i * in.logits.stride[1] + j * in.logits.stride[2]);
      to.logits[to.at(input, n, out)] = counts ? b[n] : -Extreme<T>::infinity;
      if (!with.ds) continue;
      if (counts && with.dcoupling.data) {
        dc[n] += with.dcoupling.template read<T>(
            sample * with.dcoupling.stride[0] + i * with.dcoupling.stride[1] + j * with.dcoupling.stride[2]);
      }
      to.dc[to.at(input, n, out)] = counts ? dc[n] : T(0);
    }
  }
}

// Running max, sum of exp and sum of exp dc of every row: [pair][3].
template <class T>
CAPSFAST_DEVICE void start_rows(int pairs, bool leaky, Shared<T> rows) {
  for (int pair = gpu::thread(); pair < pairs; pair += gpu::threads()) {
    // The leaky entry: logit 0, and nothing flows back through it.
    rows[pair * 3] = leaky ? T(0) : Extreme<T>::lowest;
    rows[pair * 3 + 1] = leaky ? T(1) : T(0);
    rows[pair * 3 + 2] = T(0);
  }
}

template <class T, int kSamples>
CAPSFAST_DEVICE void add_rows(const Tile& tile, const Scores<T, kSamples>& scores, bool with_dc, Shared<T> rows) {
  constexpr int kLanes = 8;
  const int lane = gpu::thread() % kLanes, groups = gpu::threads() / kLanes, pairs = tile.inputs * kSamples;
  for (int first = 0; first < pairs; first += groups) {
    const int pair = first + gpu::thread() / kLanes;
    const bool mine = pair < pairs && pair % kSamples < tile.samples;
    const int outputs = mine ? tile.outputs : 0, row = pair * scores.pitch;
    T m = mine ? static_cast<T>(rows[pair * 3]) : T(0);
    const T before = m;
    for (int j = lane; j < outputs; j += kLanes) m = larger<T>(m, scores.logits[row + j]);
    for (int mask = kLanes / 2; mask > 0; mask /= 2) m = larger<T>(m, gpu::shuffle_xor(m, mask));
    T sum = T(0), mean = T(0);
    for (int j = lane; j < outputs; j += kLanes) {
      const T e = std::exp(scores.logits[row + j] - m);
      sum += e;
      if (with_dc) mean += e * scores.dc[row + j];
    }
    sum = lane_sum(sum, kLanes);
    mean = lane_sum(mean, kLanes);
    gpu::warp_barrier();  // all lanes have read the row's state
    if (!mine || lane != 0) continue;
    const T factor = std::exp(before - m);
    rows[pair * 3] = m;
    rows[pair * 3 + 1] = rows[pair * 3 + 1] * factor + sum;
    rows[pair * 3 + 2] = rows[pair * 3 + 2] * factor + mean;
  }
}

// exp(x) in half the instructions: the rounding of the product costs what one of x would.
CAPSFAST_DEVICE float exponential(float x) { return std::exp2(x * 1.44269504f); }

// Without any finite logit the coupling is 0.
template <class T>
CAPSFAST_DEVICE T inverse(T sum) {
  return sum == T(0) ? T(0) : T(1) / sum;
}

template <class T>
CAPSFAST_DEVICE void end_rows(int pairs, Shared<T> rows) {
  for (int pair = gpu::thread(); pair < pairs; pair += gpu::threads()) {
    const T scale = inverse<T>(rows[pair * 3 + 1]);
    rows[pair * 3 + 1] = scale;
    rows[pair * 3 + 2] *= scale;
  }
}

// logits to c, and dc to db = c (dc - mean), in place. Where `all` lacks a maximum, rows hold what it would.
template <class T, int kSamples>
CAPSFAST_DEVICE void normalise(const Inputs& in, const Tile& tile, const Normaliser<T>& all, Shared<T> rows,
                               bool with_dc, const Scores<T, kSamples>& scores) {
  const int count = tile.inputs * kSamples * tile.outputs;
  for (int n = gpu::thread(); n < count; n += gpu::threads()) {
    const int out = n % tile.outputs, pair = n / tile.outputs, sample = pair % kSamples;
    if (sample >= tile.samples) continue;
    T max, scale, mean = T(0);
    if (all.max) {
      const int64_t b = tile.b0 + sample;
      const int64_t at = in.softmax_in ? b * in.J + tile.j0 + out : b * in.I + tile.i0 + pair / kSamples;
      max = all.max[at];
      scale = all.scale[at];
      if (with_dc) mean = all.mean[at];
    } else {
      max = rows[pair * 3];
      scale = rows[pair * 3 + 1];
      mean = rows[pair * 3 + 2];
    }
    const int at = pair * scores.pitch + out;
    const T c = std::exp(scores.logits[at] - max) * scale;
    scores.logits[at] = c;
    if (with_dc) scores.dc[at] = c * (scores.dc[at] - mean);
  }
}

// score, softmax and its derivative of a tile, from votes to c and db. Starts and ends at a barrier.
template <class T, class E, bool kVotes, int kSamples>
CAPSFAST_DEVICE void couple(const Inputs& in, const Tile& tile, const Scoring<T>& with, const Normaliser<T>& all,
                            Shared<T> rows, const Scores<T, kSamples>& to) {
  const bool with_dc = static_cast<bool>(with.ds);
  const int pairs = tile.inputs * kSamples;
  if (!all.max) start_rows(pairs, in.leaky, rows);
  score<T, E, kVotes>(in, tile, with, to);
  gpu::barrier();
  if (!all.max) {
    add_rows(tile, to, with_dc, rows);
    gpu::barrier();
    end_rows(pairs, rows);
    gpu::barrier();
  }
  normalise(in, tile, all, rows, with_dc, to);
  gpu::barrier();
}

}  // namespace capsfast::cuda
