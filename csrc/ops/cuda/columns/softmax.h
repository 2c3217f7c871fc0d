// From dot products to coupling coefficients c and, in the backward, db, in the registers of the column warps of a
// strip. Each column warp has a part of the output capsules, so they exchange their sums.
#pragma once

#include <cmath>

#include "votes.h"

namespace capsfast::cuda::columns {

// The sums of a softmax over some output capsules: total = sum exp(b - max) and, in the backward, mean = sum exp(b -
// max) dc. max is 0 if every logit is near 0. If there is no logit, total is 0, and max means nothing.
struct alignas(16) Norm {
  float max, total, mean, unused;

  // The same sums relative to another maximum.
  CAPSFAST_DEVICE void rescale(float to) {
    const float factor = exponential(max - to);
    total *= factor;
    mean *= factor;
    max = to;
  }
};

// norms[row], as a choice between registers: an index would put both norms into memory.
CAPSFAST_DEVICE Norm one_of(const Norm (&norms)[2], int row) {
  const bool second = row == 1;
  return {second ? norms[1].max : norms[0].max, second ? norms[1].total : norms[0].total,
          second ? norms[1].mean : norms[0].mean, 0.0f};
}

// The norms that column warps give each other: [2 turns][teams][column warps][16 samples], after the ring. With two
// turns one barrier for each input capsule is enough: a column warp overwrites the norms of the turn before last, and
// the other column warps have read these norms before the last barrier.
class Exchange {
 public:
  CAPSFAST_HOST_DEVICE static int bytes(const Cut& cut) {
    return cut.warps == 1 ? 0 : 2 * cut.warps * cut.strips * cut.streams * kStrip * static_cast<int>(sizeof(Norm));
  }
  CAPSFAST_DEVICE Exchange(const Cut& cut, const Coord& at, int offset)
      : norms(gpu::shared<Norm>(offset, bytes(cut) / static_cast<int>(sizeof(Norm)))),
        warps(cut.warps),
        team(at.team(cut)),
        turn(cut.warps * cut.strips * cut.streams) {}

  // Gives the norms of the lane's samples; afterwards the norms of other column warps can be read.
  CAPSFAST_DEVICE void give(const Coord& at, const Norm (&mine)[2]) {
    odd = !odd;
    if (at.quad < 2) norms.write(place(at.warp, at.group + 8 * at.quad), one_of(mine, at.quad));
    gpu::named_barrier(team + 1, 32 * warps);
  }
  CAPSFAST_DEVICE Norm take(int warp, int sample) const { return norms.template vector<Norm>(place(warp, sample)); }

 private:
  CAPSFAST_DEVICE int place(int warp, int sample) const {
    return ((odd ? turn : 0) + team * warps + warp) * kStrip + sample;
  }
  const Shared<Norm> norms;
  const int warps, team, turn;
  bool odd = false;
};

// Adds up the norms take(n), 0 <= n < count, of a sample, in a fixed order. The lanes of a quad share the norms.
template <class Take>
CAPSFAST_DEVICE Norm sum_norms(int quad, int count, const Take& take) {
  Norm sum = {Extreme<float>::lowest, 0.0f, 0.0f, 0.0f};
  bool far = false;
  for (int n = quad; n < count; n += 4) {
    Norm other = take(n);
    if (other.total == 0.0f) other.max = Extreme<float>::lowest;
    const float max = std::fmax(sum.max, other.max);
    if (max != other.max) other.rescale(max);
    if (max != sum.max) sum.rescale(max);
    sum.total += other.total;
    sum.mean += other.mean;
    sum.max = max;
    far = far || (sum.total != 0.0f && max != 0.0f);
  }
  if (gpu::any(far)) {
    sum.rescale(quad_max(sum.max));
  } else {
    sum.max = 0.0f;
  }
  sum.total = quad_sum(sum.total);
  sum.mean = quad_sum(sum.mean);
  return sum;
}

// Bits 2 slot + row of a lane. outputs: output capsules that exist and that no mask removes. counted: those that the
// lane counts in sums over lanes. A lane with a masked input capsule counts nothing.
struct Valid {
  unsigned outputs, counted;
  CAPSFAST_DEVICE bool has(int slot, int row) const { return outputs >> (2 * slot + row) & 1; }
  CAPSFAST_DEVICE bool counts(int slot, int row) const { return counted >> (2 * slot + row) & 1; }
};

// The norms of a column warp. Replaces b by exp(b - max). leaky: this column warp counts the leaky entry, whose logit
// is 0. kOptions: some outputs may not be valid; their b becomes 0, and so does dc, even if they are NaN.
template <class Tr, bool kBackward, bool kOptions>
CAPSFAST_DEVICE void exponentials(const Valid& valid, bool leaky, Scores<Tr>& b, Scores<Tr>& dc, Norm (&norm)[2]) {
  bool far = false;
  unrolled<Tr::slots, 2>([&](int slot, int row) { far = far | (std::fabs(b[slot][row]) > kNear); });
  norm[0].max = norm[1].max = 0.0f;
  if (gpu::any(far)) {
    unrolled<2>([&](int row) {
      float m = kOptions && leaky ? 0.0f : Extreme<float>::lowest;
      unrolled<Tr::slots>([&](int slot) { m = valid.counts(slot, row) ? std::fmax(m, b[slot][row]) : m; });
      m = quad_max(m);
      // Only the logit of padding can exceed the maximum. The coefficient of padding may be any number but not NaN.
      unrolled<Tr::slots>([&](int slot) {
        const float x = b[slot][row] - m;
        b[slot][row] = x > 0.0f ? 0.0f : x;
      });
      norm[row].max = m;
    });
  }
  unrolled<2>([&](int row) {
    float total = 0.0f, mean = 0.0f;
    unrolled<Tr::slots>([&](int slot) {
      float e = exponential(b[slot][row]);
      if constexpr (kOptions) {
        if (!valid.has(slot, row)) e = 0.0f, dc[slot][row] = 0.0f;
      }
      b[slot][row] = e;
      const float term = valid.counts(slot, row) ? e : 0.0f;
      total += term;
      if constexpr (kBackward) mean += term * dc[slot][row];
    });
    norm[row].total = quad_sum(total);
    norm[row].mean = kBackward ? quad_sum(mean) : 0.0f;
    if (kOptions && leaky) norm[row].total += exponential(-norm[row].max);
  });
}

// Turns exp(b - max) into c, and dc into db = c (dc - mean), with the norm over all output capsules. max: what b is
// relative to.
template <class Tr, bool kBackward, bool kOptions>
CAPSFAST_DEVICE void normalise(const Norm& all, float max, int row, Scores<Tr>& b, Scores<Tr>& dc) {
  float scale = gpu::reciprocal(all.total);
  if (kOptions && all.total == 0.0f) scale = 0.0f;  // no logit is left
  const float mean = all.mean * scale;
  // max can exceed all.max only where the coefficients are 0.
  if (max != all.max) scale *= exponential(std::fmin(max - all.max, 0.0f));
  unrolled<Tr::slots>([&](int slot) {
    const float c = b[slot][row] * scale;
    b[slot][row] = c;
    if constexpr (kBackward) dc[slot][row] = c * (dc[slot][row] - mean);
  });
}

}  // namespace capsfast::cuda::columns
