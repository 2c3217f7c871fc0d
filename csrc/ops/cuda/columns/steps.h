// The steps between the passes: they add up partial sums, squash, and write what the next pass reads, all in the order
// of the fragments. A thread has a four of a strip: two neighbouring components of two samples. A block of threads has
// some groups of lanes of a strip and a column warp, with all tiles, so it has whole output capsules. `slices` threads
// share a four; each adds up some of the splits, with all its loads on their way at once.
#pragma once

#include "../update.h"
#include "layout.h"

namespace capsfast::cuda::columns {

// Loads of a thread that are on their way at once.
constexpr int kTogether = 8;

// The sum of fours from[begin + n plane], 0 <= n < count, for the threads of slice 0. `slices` threads with the same
// `number`, below `width`, share a sum; each adds some n. Shared memory from byte `memory` on has a four for each
// thread. All threads of the block must call it.
CAPSFAST_DEVICE Four sum_slices(const Global<const Four>& from, int64_t begin, int64_t plane, int count, int slice,
                                int slices, int number, int width, int memory) {
  const int64_t step = slices * plane;
  int64_t at = begin + slice * plane;
  Four sum = {};
#pragma unroll 1
  for (int n = slice; n < count && slice < slices; n += kTogether * slices) {
    Four x[kTogether] = {};
    unrolled<kTogether>([&](int m) {
      if (n + m * slices < count) x[m] = from.template vector_once<Four>(at);
      at += step;
    });
    unrolled<kTogether>([&](int m) { add(sum.value, x[m]); });
  }
  const Shared<Four> all = gpu::shared<Four>(memory, width * slices);
  if (slice > 0 && slice < slices) all[slice * width + number] = sum;
  gpu::barrier();
  for (int n = 1; n < slices && slice == 0; ++n) add(sum.value, all[n * width + number]);
  return sum;
}

// How a step is cut.
constexpr int kStepGroups = 2;  // of lanes in a block of threads
struct StepCut {
  int slices;
  int tiles;  // of a column warp: Columns::tiles

  CAPSFAST_HOST_DEVICE int fours() const { return kStepGroups * 4 * tiles; }
  CAPSFAST_HOST_DEVICE int threads() const { return (fours() * slices + 31) / 32 * 32; }
  CAPSFAST_HOST_DEVICE int bytes() const { return 16 * fours() * (slices + 1); }
};

struct StepArgs {
  StepCut step;
  int strips, column_warps, lanes, splits;
  int sums_strips;  // strips of `sums`, with those beyond the batch
  int B, J, D;
  int t, iterations;  // the step makes V of iteration t + 1 or v, and in the backward ds of iteration t
  bool unweighted;    // the pass took every coefficient as 1
  bool leaky;
  bool sums_alone;  // backward: the gradient of v_t comes from one pass, without what was added before
  BiasedSquashing squash;
  Mask out_mask;
  Operand v, dv;             // [B, J, D]: written in the last step of a forward; read in the first of a backward
  Global<float> s;           // [r, B, J, D], without bias: written in the forward, read in the backward
  Global<float> V, ds, G;    // in the order of the fragments; V and ds for each iteration, in the forward one V
  Global<const float> sums;  // [splits][strips][column warps][tiles][32] fours
};

constexpr int kMostStepThreads = 1024;

// A thread's four: components d and d + 1 of output capsule j in samples b and b + 8.
class StepThread {
 public:
  CAPSFAST_DEVICE explicit StepThread(const StepArgs& args) : a(args) {
    const unsigned width = static_cast<unsigned>(4 * kStepGroups), thread = static_cast<unsigned>(gpu::thread());
    const unsigned fours = static_cast<unsigned>(a.step.fours());
    slice = static_cast<int>(thread / fours);
    number = static_cast<int>(thread % fours);
    const int strip = static_cast<int>(gpu::block_x()), warp = static_cast<int>(gpu::block_y());
    const int lane = static_cast<int>(gpu::block_z() * width + thread % fours % width), quad = lane % 4;
    tile = static_cast<int>(thread % fours / width);
    b = strip * kStrip + lane / 4;
    at = ((int64_t{strip} * a.column_warps + warp) * a.step.tiles + tile) * 32 + lane;
    const int column = column_of(tile, 2 * quad), padded = kSpan * a.lanes;
    j = warp * (a.step.tiles * 8 / padded) + column / padded;
    d = column % padded;
    first_element = (int64_t{b} * a.J + j) * a.D + d;
    unrolled<4>([&](int n) { exists[n] = b + n / 2 * 8 < a.B && j < a.J && d + n % 2 < a.D; });
  }

  // Calls f(n) for the elements that exist of the four: component d + n % 2 of sample b + n / 2 * 8.
  template <class F>
  CAPSFAST_DEVICE void each(const F& f) const {
    unrolled<4>([&](int n) {
      if (exists[n]) f(n);
    });
  }
  // The element of tensors [B, J, D].
  CAPSFAST_DEVICE int64_t element(int n) const { return first_element + n / 2 * 8 * a.J * a.D + n % 2; }
  CAPSFAST_DEVICE bool valid(int row) const { return b + row * 8 < a.B && j < a.J && a.out_mask.at(b + row * 8, j); }

  // The sum over the splits. Only threads of slice 0 get it.
  CAPSFAST_DEVICE Four sum_splits() const {
    const int64_t plane = int64_t{a.sums_strips} * a.column_warps * a.step.tiles * 32;
    return sum_slices(a.sums.as<const Four>(), at, plane, a.splits, slice, a.step.slices, number, a.step.fours(),
                      16 * a.step.fours());
  }

  // The sums over an output capsule of `mine`: two numbers of sample b, two of sample b + 8. All threads must call it.
  CAPSFAST_DEVICE Four over_output(const Four& mine) const {
    const Shared<Four> all = gpu::shared<Four>(0, a.step.fours());
    gpu::barrier();  // all have read what is overwritten now
    if (slice == 0) all[number] = mine;
    gpu::barrier();
    Four sum = {};
    if (slice > 0) return sum;
    const int width = 4 * kStepGroups, lane = number % width;
    const int lanes = tile < kWholeTiles ? a.lanes : 4, begin = lane & -lanes;
    for (int n = begin; n < begin + lanes; ++n) {
      if (tile < kWholeTiles) {
        unrolled<kWholeTiles>([&](int t) { add(sum.value, all[t * width + n]); });
      } else {
        unrolled<2>([&](int t) { add(sum.value, all[(kWholeTiles + t) * width + n]); });
      }
    }
    return sum;
  }

  const StepArgs& a;
  int64_t at;             // the four, in arrays in the order of the fragments
  int64_t first_element;  // of the lane, in tensors [B, J, D]
  bool exists[4];
  int slice, number, tile, b, j, d;
};

// Copies a four with padding 0.
CAPSFAST_DEVICE Four only_existing(const StepThread& thread, const Four& x) {
  Four to = {};
  thread.each([&](int n) { to.value[n] = x.value[n]; });
  return to;
}

CAPSFAST_KERNEL(kMostStepThreads, 1)
forward_step_kernel(StepArgs a) {
  gpu::wait_for_launch_before();
  const StepThread thread(a);
  Four s = only_existing(thread, thread.sum_splits()), squared = {}, x = {};
  const bool last = a.t + 1 == a.iterations, writes = thread.slice == 0;
  if (writes) {
    if (a.unweighted) {
      const Inputs in = {a.B, 0, a.J, a.D, 1, false, a.leaky, {}, {}, {}, {}, {}, a.out_mask};
      unrolled<2>([&](int row) {
        const int b = thread.b + row * 8;
        const float c = b < a.B ? uniform<float>(in, b, thread.valid(row)) : 0.0f;
        s.value[2 * row] *= c, s.value[2 * row + 1] *= c;
      });
    }
    thread.each([&](int n) {
      a.s[a.t * int64_t{a.B} * a.J * a.D + thread.element(n)] = s.value[n];
      x.value[n] = a.squash.biased(s.value[n], thread.j, thread.d + n % 2);
      squared.value[n / 2] += x.value[n] * x.value[n];
    });
  }
  const Four norm = thread.over_output(squared);
  if (!last) gpu::let_next_launch_start();
  if (!writes) return;
  float factor[2];
  unrolled<2>([&](int row) { factor[row] = a.squash.factor(last, norm.value[row]); });
  Four out = {};
  thread.each([&](int n) {
    if (thread.valid(n / 2)) out.value[n] = factor[n / 2] * x.value[n];
    if (last) a.v.write<float>(thread.element(n), out.value[n]);
  });
  if (last) return;
  const Global<Four> V = a.V.as<Four>();
  if (a.t > 0 && a.squash.accumulate) add(out.value, V[thread.at]);
  V[thread.at] = out;
}

// The first step of a backward, with t + 1 == iterations, also makes V of all iterations from s. Then every step
// differentiates the squash of iteration t.
CAPSFAST_KERNEL(kMostStepThreads, 1)
backward_step_kernel(StepArgs a) {
  gpu::wait_for_launch_before();
  const StepThread thread(a);
  const bool last = a.t + 1 == a.iterations, writes = thread.slice == 0;
  const int64_t all = int64_t{a.strips} * a.column_warps * a.step.tiles * 32;  // fours of an iteration
  const Global<Four> V = a.V.as<Four>(), ds = a.ds.as<Four>(), G = a.G.as<Four>();
  // s of an iteration with its bias, and the squares of its samples.
  const auto load = [&](int t, Four* s, Four* x) {
    Four squared = {};
    thread.each([&](int n) {
      s->value[n] = a.s[t * int64_t{a.B} * a.J * a.D + thread.element(n)];
      x->value[n] = a.squash.biased(s->value[n], thread.j, thread.d + n % 2);
      squared.value[n / 2] += x->value[n] * x->value[n];
    });
    return squared;
  };
  if (last) {
    Four sum = {};
    for (int t = 0; t + 1 < a.iterations; ++t) {
      Four s = {}, x = {}, squared = {};
      if (writes) squared = load(t, &s, &x);
      const Four norm = thread.over_output(squared);
      if (!writes) continue;
      float factor[2];
      unrolled<2>([&](int row) { factor[row] = a.squash.factor(false, norm.value[row]); });
      thread.each([&](int n) {
        const float v = thread.valid(n / 2) ? factor[n / 2] * x.value[n] : 0.0f;
        sum.value[n] = a.squash.accumulate ? sum.value[n] + v : v;
      });
      V[(t + 1) * all + thread.at] = sum;
    }
  }
  Four g = {}, s = {}, x = {}, sums = {};
  if (!last) g = only_existing(thread, thread.sum_splits());
  if (writes) {
    if (last)
      thread.each([&](int n) {
        const int row = thread.b + n / 2 * 8;
        g.value[n] = a.dv.read<float>(a.dv.at(row, thread.j, thread.d + n % 2));
      });
    if (!last && !a.sums_alone) add(g.value, G[thread.at]);
    G[thread.at] = g;
    sums = load(a.t, &s, &x);
    thread.each([&](int n) { sums.value[2 + n / 2] += x.value[n] * g.value[n]; });
  }
  const Four of_output = thread.over_output(sums);  // |x|^2 of both samples, then x . g
  gpu::let_next_launch_start();
  if (!writes) return;
  float factor[2], slope[2];
  unrolled<2>([&](int row) {
    factor[row] = a.squash.factor(last, of_output.value[row]);
    slope[row] = a.squash.slope(last, of_output.value[row], of_output.value[2 + row]);
  });
  Four to = {};
  thread.each([&](int n) {
    if (thread.valid(n / 2)) to.value[n] = factor[n / 2] * g.value[n] + slope[n / 2] * x.value[n];
  });
  ds[a.t * all + thread.at] = to;
}

// to [size] = the sum of `parts` arrays. size is a multiple of four.
struct PartsArgs {
  int parts, slices;
  int64_t size;
  Global<const float> from;  // [parts, size]
  Operand to;
};

CAPSFAST_KERNEL(kThreads, 4)
join_parts_kernel(PartsArgs a) {
  gpu::wait_for_launch_before();
  const int width = gpu::threads() / a.slices, slice = gpu::thread() / width, number = gpu::thread() % width;
  for (int64_t n0 = gpu::block_x() * width; n0 < a.size / 4; n0 += gpu::blocks_x() * width) {
    const bool exists = n0 + number < a.size / 4;
    const Four sum = sum_slices(
        a.from.as<const Four>(), n0 + number, a.size / 4, exists ? a.parts : 0, slice, a.slices, number, width, 0);
    gpu::barrier();
    if (slice > 0 || !exists) continue;
    if (a.to.storage == Storage::f32) {
      a.to.data.as<Four>()[n0 + number] = sum;
    } else {
      unrolled<4>([&](int n) { a.to.write<float>(4 * (n0 + number) + n, sum.value[n]); });
    }
  }
}

// dbias [J, D] = the sum of ds over samples and iterations.
struct BiasArgs {
  int strips, column_warps, tiles, lanes, J, D;
  int start, iterations;   // iterations [start, iterations)
  Global<const float> ds;  // [r][strips][column warps][tiles][32] fours
  Operand dbias;
};

// A block has a tile of a column warp, and its warps share the strips.
constexpr int kBiasWarps = 8;

CAPSFAST_KERNEL(32 * kBiasWarps, 1)
bias_kernel(BiasArgs a) {
  gpu::wait_for_launch_before();
  const int tile = static_cast<int>(gpu::block_x()), column_warp = static_cast<int>(gpu::block_y());
  const int lane = gpu::thread() % 32, warp = gpu::thread() / 32;
  const int64_t end = int64_t{a.iterations} * a.strips;
  double sum[2] = {};
#pragma unroll 4
  for (int64_t n = int64_t{a.start} * a.strips + warp; n < end; n += kBiasWarps) {
    const Four x = a.ds.as<const Four>()[((n * a.column_warps + column_warp) * a.tiles + tile) * 32 + lane];
    unrolled<2>([&](int e) { sum[e] += double{x.value[e]} + double{x.value[2 + e]}; });
  }
  for (int mask = 4; mask < 32; mask *= 2) unrolled<2>([&](int e) { sum[e] += gpu::shuffle_xor(sum[e], mask); });
  const Shared<double> sums = gpu::shared<double>(0, kBiasWarps * 8);
  if (lane < 4) unrolled<2>([&](int e) { sums[8 * warp + 2 * lane + e] = sum[e]; });
  gpu::barrier();
  const int n = gpu::thread();
  if (n >= 8) return;
  double total = 0;
  for (int other = 0; other < kBiasWarps; ++other) total += sums[8 * other + n];
  const int column = column_of(tile, n), padded = kSpan * a.lanes;
  const int j = column_warp * (a.tiles * 8 / padded) + column / padded, d = column % padded;
  if (j < a.J && d < a.D) a.dbias.write<double>(int64_t{j} * a.D + d, total);
}

}  // namespace capsfast::cuda::columns
