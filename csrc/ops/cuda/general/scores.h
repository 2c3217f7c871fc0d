// The routing logits of a tile in shared memory, their softmax and its backward, for the general kernels.
#pragma once

#include <cstdint>

#include "../warp.h"
#include "votes.h"

namespace capsfast::cuda {

// The scores of a tile: logits[pair][j] and, in the backward, dc[pair][j], where pair = input * kSamples + sample.
// `pitch` is the distance between pairs.
template <class T, int kSamples>
struct Scores {
  Shared<T> logits, dc;
  int pitch;

  CAPSFAST_DEVICE int at(int input, int sample, int j) const { return (input * kSamples + sample) * pitch + j; }
};

// Writes votes . V + logits, or -inf for what is masked, to to.logits. If there is ds, also writes votes . ds +
// dcoupling to to.dc.
template <class T, class E, bool kVotes, int kSamples>
CAPSFAST_DEVICE void score(const Inputs& in, const Tile& tile, const Scoring<T>& with, const Scores<T, kSamples>& to) {
  const int lanes = lanes_for(in.D), lane = gpu::thread() % lanes, groups = gpu::threads() / lanes;
  const int units = tile.inputs * tile.outputs;
  // A unit is a pair of input and output capsule; a group of lanes has one at a time. All groups make the same number
  // of rounds, so that all lanes of a warp take part in every shuffle.
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
      if (counts && in.prior.data)
        b[n] += in.prior.template read<T>(sample * in.prior.stride[0] + j * in.prior.stride[1]);
      to.logits[to.at(input, n, out)] = counts ? b[n] : -Extreme<T>::infinity;
      if (!with.ds) continue;
      if (counts && with.dcoupling.data) {
        dc[n] += with.dcoupling.template read<T>(
            sample * with.dcoupling.stride[0] + i * with.dcoupling.stride[1] + j * with.dcoupling.stride[2]);
      }
      if (counts && with.dmass.data)
        dc[n] += with.dmass.template read<T>(sample * with.dmass.stride[0] + j * with.dmass.stride[1]);
      to.dc[to.at(input, n, out)] = counts ? dc[n] : T(0);
    }
  }
}

// rows [pair][3] holds, for each row of scores, the maximum m so far, the sum of exp(b - m) and that of exp(b - m) dc.
// start_rows() sets it up and add_rows() adds the scores of a tile.
template <class T>
CAPSFAST_DEVICE void start_rows(int pairs, bool leaky, Shared<T> rows) {
  for (int pair = gpu::thread(); pair < pairs; pair += gpu::threads()) {
    // The leaky entry has logit 0, and its dc is 0.
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
    gpu::warp_barrier();  // all lanes have read what is overwritten below
    if (!mine || lane != 0) continue;
    const T factor = std::exp(before - m);
    rows[pair * 3] = m;
    rows[pair * 3 + 1] = rows[pair * 3 + 1] * factor + sum;
    rows[pair * 3 + 2] = rows[pair * 3 + 2] * factor + mean;
  }
}

// Turns rows [pair][3] into maximum, scale and mean.
template <class T>
CAPSFAST_DEVICE void end_rows(int pairs, Shared<T> rows) {
  for (int pair = gpu::thread(); pair < pairs; pair += gpu::threads()) {
    const T scale = inverse<T>(rows[pair * 3 + 1]);
    rows[pair * 3 + 1] = scale;
    rows[pair * 3 + 2] *= scale;
  }
}

// Replaces logits by c and, if there is ds, dc by db = c (dc - mean + dlse). If `all.max` is null, `rows` [pair][3]
// holds max, scale and mean.
template <class T, int kSamples>
CAPSFAST_DEVICE void normalise(const Inputs& in, const Tile& tile, const Scoring<T>& with, const Normaliser<T>& all,
                               Shared<T> rows, const Scores<T, kSamples>& scores) {
  const bool with_dc = static_cast<bool>(with.ds);
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
    if (with.dlse.data)
      mean -= with.dlse.template read<T>(
          (tile.b0 + sample) * with.dlse.stride[0] + (tile.i0 + pair / kSamples) * with.dlse.stride[1]);
    const int at = pair * scores.pitch + out;
    const T c = std::exp(scores.logits[at] - max) * scale;
    scores.logits[at] = c;
    if (with_dc) scores.dc[at] = c * (scores.dc[at] - mean);
  }
}

// Computes c and, in the backward, db of a tile from its votes. Must be called after a barrier, and ends with one.
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
  normalise(in, tile, with, all, rows, to);
  gpu::barrier();
}

}  // namespace capsfast::cuda
