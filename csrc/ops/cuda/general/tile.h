// The part of the work that a block of the general kernels does at a time: votes in registers, made from poses and
// weights in shared memory, and routing logits in shared memory, with their softmax and its backward.
#pragma once

#include <cstdint>

#include "../../../math/softmax.h"
#include "../warp.h"

namespace capsfast::cuda {

// How many blocks a multiprocessor must hold: many blocks hide latencies, few blocks leave each thread more registers.
constexpr int kAccumulateBlocks = 4, kGradientBlocks = 3;

constexpr int kSamples = 8;     // of every tile: a weight is read once for all
constexpr int kMostInputs = 8;  // input capsules of a tile
constexpr int kTilesInT = 8;    // tiles whose terms are added in T; their sums are added in double

// Components of an output capsule that a thread has. A vector access moves as many numbers.
template <class T>
constexpr int kRun = 16 / static_cast<int>(sizeof(T));

CAPSFAST_HOST_DEVICE inline int clamped(int64_t n, int64_t most) {
  return static_cast<int>(n < 1 ? 1 : n < most ? n : most);
}

// A thread has one run of components of one output capsule, for one input capsule and all samples of a tile. A tile has
// as many output capsules as its threads can take. If there are few output capsules, a tile has several input capsules.
template <class T>
struct TileShape {
  int runs, outputs, inputs;  // of a tile: runs of an output capsule, output capsules, input capsules
  int pieces;                 // tiles that share the components of an output capsule, if the threads are too few

  static CAPSFAST_HOST_DEVICE TileShape of(int64_t J, int64_t D) {
    const int64_t runs = clamped((D + kRun<T> - 1) / kRun<T>, INT32_MAX);
    TileShape to;
    to.runs = clamped(runs, kThreads);
    to.outputs = clamped(J, kThreads / to.runs);
    to.inputs = clamped(kThreads / (to.runs * to.outputs), kMostInputs);
    to.pieces = static_cast<int>((runs + to.runs - 1) / to.runs);
    return to;
  }
  CAPSFAST_HOST_DEVICE int columns() const { return outputs * runs; }  // threads of an input capsule
  CAPSFAST_HOST_DEVICE bool whole(int64_t J) const { return outputs >= J && pieces == 1; }
};

CAPSFAST_DEVICE int at_most(int64_t rest, int64_t most) { return static_cast<int>(rest < most ? rest : most); }

// The normaliser of the scores of a sample and an input capsule. Until finished(), `scale` is the sum of exp(b - max),
// and `mean` the sum of exp(b - max) dc.
template <class T>
struct Row {
  T max, scale, mean;

  // The leaky entry has logit 0, and its dc is 0.
  static CAPSFAST_DEVICE Row empty(const Inputs& in) {
    return in.leaky ? Row{T(0), T(1), T(0)} : Row{Extreme<T>::lowest, T(0), T(0)};
  }
  CAPSFAST_DEVICE Row finished() const { return {max, inverse(scale), mean * inverse(scale)}; }
};

// Samples [b0, b0 + samples), input capsules [i0, i0 + inputs), output capsules [j0, j0 + outputs) and the components
// of a piece from d0 on. E is the element type of u, weight and votes. kVotes: the votes are an input.
template <class T, class E, bool kVotes>
struct Tile {
  static constexpr int width = kRun<T>;
  using Vector = Run<T, width>;
  // The poses and weights of `staged` components k, which are `staged_runs` runs, are in shared memory at a time.
  static constexpr int staged_runs = 2, staged = staged_runs * width;
  // Shared memory, in elements. An odd pitch spreads the rows of a matrix over the banks.
  static constexpr int pitch = kThreads + 1, scores = kSamples * pitch,
                       most_weights = staged_runs * width * pitch * width,
                       most_poses = kVotes ? 0 : kMostInputs * kSamples * staged,
                       scores_from = most_weights + most_poses, elements = scores_from + 2 * scores;

  const Inputs& in;
  const TileShape<T> shape = TileShape<T>::of(in.J, in.D);
  // Whether runs can be loaded as vectors.
  const bool matrix_in_runs = in_runs(in.matrix, 4, kVotes ? in.D : in.K), poses_in_runs = in_runs(in.u, 3, in.K);
  // Whether the weights are also without gaps between components and output capsules.
  const bool weights_in_rows =
      matrix_in_runs && in.matrix.stride[1] == in.D * in.matrix.stride[2] && in.D % width == 0 && shape.pieces == 1;
  bool weights_stay = false, weights_staged = false;  // the next tile has the same weights; its weights are there

  int64_t b0 = 0, i0 = 0, j0 = 0, d0 = 0;
  int piece = 0, samples = 0, inputs = 0, outputs = 0;
  // This thread's input capsule, output capsule and run of components in the tile.
  const int input = gpu::thread() / shape.columns(), out = gpu::thread() / shape.runs % shape.outputs,
            d_run = gpu::thread() % shape.runs;
  T votes[kSamples][width] = {};
  // How many neighbouring threads share the scores of a sample and an input capsule.
  const int lanes = lanes_for(kThreads / (kSamples * shape.inputs) / 2 + 1);

  Shared<T> weights = array(0, most_weights);         // [run of k][component m of a thread][thread]
  Shared<T> poses = array(most_weights, most_poses);  // [input][run of k][sample]
  // [sample][thread]. c has parts of dot products; then, at the first run of an output capsule, the logits, and at last
  // the coupling. dc, in the backward: parts of dot products, then dc, then db.
  Shared<T> c = array(scores_from, scores), dc = array(scores_from + scores, scores);

  // `count` elements of shared memory from element `from` on. Elements up to `elements` belong to the tile.
  static CAPSFAST_DEVICE Shared<T> array(int from, int count) {
    return gpu::shared<T>(from * static_cast<int>(sizeof(T)), count);
  }
  // Whether runs of `width` elements along the last of the axes, `length` elements long, can be loaded as vectors.
  static CAPSFAST_DEVICE bool in_runs(const Operand& from, int axes, int64_t length) {
    bool yes = from.data.aligned(width * sizeof(E)) && length % width == 0 && from.stride[axes - 1] == 1;
    for (int axis = 0; axis < axes - 1; ++axis) yes = yes && from.stride[axis] % width == 0;
    return yes;
  }

  // Calls f(n, m) for component m of sample n, of this thread's votes.
  template <class F>
  static CAPSFAST_DEVICE void for_votes(const F& f) {
    unrolled<kSamples>([&](int n) { unrolled<width>([&](int m) { f(n, m); }); });
  }

  // The same for pairs of components of two runs.
  template <class F>
  static CAPSFAST_DEVICE void for_square(const F& f) {
    unrolled<width>([&](int m) { unrolled<width>([&](int k) { f(m, k); }); });
  }

  // Writes this thread's runs to `to` [sample][thread].
  static CAPSFAST_DEVICE void put_runs(const Shared<T>& to, const T (&from)[kSamples][width]) {
    unrolled<kSamples>([&](int n) {
      Vector run;
      unrolled<width>([&](int m) { run.value[m] = from[n][m]; });
      to.write((n * kThreads + gpu::thread()) * width, run);
    });
  }

  // Limits the tile to samples, input and output capsules that exist.
  CAPSFAST_DEVICE void fit(int64_t i_end) {
    samples = at_most(in.B - b0, kSamples);
    inputs = at_most(i_end - i0, shape.inputs);
    outputs = at_most(in.J - j0, shape.outputs);
  }

  // Whether this thread has votes.
  CAPSFAST_DEVICE bool active() const { return input < inputs && out < outputs; }
  CAPSFAST_DEVICE int slot() const { return gpu::thread() - d_run; }
  // This thread's first component.
  CAPSFAST_DEVICE int64_t component() const { return d0 + d_run * width; }
  // Where the weights of component m of a thread's run are staged, for run number `run` of k.
  static CAPSFAST_DEVICE int place(int run, int m, int thread) { return ((run * width + m) * pitch + thread) * width; }
  static CAPSFAST_DEVICE int pose_place(int input, int run, int sample) {
    return ((input * staged_runs + run) * kSamples + sample) * width;
  }

  // `width` elements from `at` on, which are neighbours.
  CAPSFAST_DEVICE Vector load_vector(const Operand& from, int64_t at) const {
    const auto run = from.data.template as<const E>().template vector_once<Run<E, width>>(at);
    Vector to;
    unrolled<width>([&](int m) { to.value[m] = T(run.value[m]); });
    return to;
  }
  // The same, or elements that lie `stride` apart, of which only `left` exist. The others are 0.
  CAPSFAST_DEVICE Vector load(const Operand& from, bool as_vector, int64_t at, int64_t stride, int left) const {
    Vector to = {};
    if (as_vector && left > 0) return load_vector(from, at);
    unrolled<width>([&](int m) {
      if (m < left) to.value[m] = T(from.data.template as<const E>()[at + m * stride]);
    });
    return to;
  }

  // Calls f(at, offset, there) for every weight that this thread stages of one input capsule: run k_run() of k, of
  // every `step`-th component. The weight is staged at `at`; in memory it lies `offset` elements after the weight of
  // (j0, d0).
  static constexpr int step = kThreads / staged_runs;
  static CAPSFAST_DEVICE int k_run() { return gpu::thread() % staged_runs; }
  template <class F>
  CAPSFAST_DEVICE void for_weights(int of, int64_t j_stride, int64_t d_stride, const F& f) const {
    for (int n = gpu::thread() / staged_runs, end = shape.columns() * width; n < end; n += step) {
      const int to = n / (shape.runs * width), d = n % (shape.runs * width);
      f(weight_at(of, n), to * j_stride + d * d_stride, to < outputs && d0 + d < in.D);
    }
  }
  CAPSFAST_DEVICE int weight_at(int of, int n) const {
    return place(k_run(), n % width, of * shape.columns() + n / width);
  }

  // Stages the poses and weights of components [k0, k0 + staged). Components that do not exist are 0; so are the poses
  // of masked input capsules. Begins and ends with a barrier.
  CAPSFAST_DEVICE void stage(int64_t k0) {
    gpu::barrier();
    for (int n = gpu::thread(); n < inputs * kSamples * staged_runs; n += kThreads) {
      const int sample = n / staged_runs % kSamples, of = n / (staged_runs * kSamples), run = n % staged_runs;
      const int64_t b = b0 + sample, i = i0 + of, k = k0 + run * width;
      Vector u = {};
      if (sample < samples && in.mask.at(b, i))
        u = load(in.u, poses_in_runs, in.u.at(b, i, k), in.u.stride[2], at_most(in.K - k, width));
      poses.write(pose_place(of, run, sample), u);
    }
    const int64_t k = k0 + k_run() * width;
    const int left = at_most(in.K - k, width);
    for (int n = 0; n < inputs && left > 0 && !weights_staged; ++n) {
      const int64_t from = in.matrix.at(i0 + n, j0, d0, k), *stride = in.matrix.stride;
      if (weights_in_rows) {
        const int row = gpu::thread() / staged_runs, at = weight_at(n, row);
#pragma unroll 4
        for (int d = 0, end = outputs * static_cast<int>(in.D) - row; d < end; d += step)
          weights.write(at + d, load_vector(in.matrix, from + (row + d) * stride[2]));
      } else {
        for_weights(n, stride[1], stride[2], [&](int at, int64_t offset, bool there) {
          weights.write(at, load(in.matrix, false, from + offset, stride[3], there ? left : 0));
        });
      }
    }
    weights_staged = weights_stay;
    gpu::barrier();
  }

  // How many of the staged runs of k this thread multiplies by.
  CAPSFAST_DEVICE int runs_from(int64_t k0) const {
    return active() ? at_most((in.K - k0 + width - 1) / width, staged_runs) : 0;
  }
  // The pose of this thread's input capsule in sample n of the tile.
  CAPSFAST_DEVICE Vector pose(int n, int run) const { return poses.template vector<Vector>(pose_place(input, run, n)); }

  // Makes the votes of a piece. Votes of a masked input capsule are 0, even if inputs hold NaN, and so are components
  // from D on. Begins with a barrier.
  CAPSFAST_DEVICE void make_votes(int of_piece) {
    d0 = static_cast<int64_t>(of_piece) * shape.runs * width;
    for_votes([&](int n, int m) { votes[n][m] = T(0); });
    if constexpr (kVotes) {
      gpu::barrier();
      if (!active()) return;
      const int left = at_most(in.D - component(), width);
      int64_t at = in.matrix.at(b0, i0 + input, j0 + out, component());
      unrolled<kSamples>([&](int n) {
        const Vector run = load(in.matrix, matrix_in_runs, at, in.matrix.stride[3], left);
        unrolled<width>([&](int m) { votes[n][m] = run.value[m]; });
        if (n + 1 < samples) at += in.matrix.stride[0];
      });
    } else {
      // Once even if K = 0: the barriers are needed.
      for (int64_t k0 = 0; k0 == 0 || k0 < in.K; k0 += staged) {
        stage(k0);
        for (int run = 0, end = runs_from(k0); run < end; ++run) {
          Vector w[width];
          unrolled<width>([&](int m) { w[m] = weights.template vector<Vector>(place(run, m, gpu::thread())); });
          unrolled<kSamples>([&](int n) {
            const Vector u = pose(n, run);
            for_square([&](int m, int k) { votes[n][m] += w[m].value[k] * u.value[k]; });
          });
        }
      }
    }
    clear_masked(votes);
  }

  // Sets the numbers of masked input capsules to 0.
  CAPSFAST_DEVICE void clear_masked(T (&of)[kSamples][width]) const {
    if (!in.mask.data || input >= inputs) return;
    unrolled<kSamples>([&](int n) {
      const bool valid = n < samples && in.mask.at(b0 + n, i0 + input);
      unrolled<width>([&](int m) { of[n][m] = valid ? of[n][m] : T(0); });
    });
  }

  // Calls f(n, x) for the samples n of the tile, where x are this thread's components of `from` [B, J, D]. Components
  // from D on are 0. Samples that do not exist repeat the last one, so no thread needs a branch for them.
  template <class F>
  CAPSFAST_DEVICE void for_vectors(const Global<const T>& from, const F& f) const {
    const int64_t d = component();
    int64_t at = (b0 * in.J + j0 + out) * in.D + d;
    const int left = at_most(in.D - d, width);
    const auto each = [&](const auto& load) {
      unrolled<kSamples>([&](int n) {
        f(n, load());
        if (n + 1 < samples) at += in.J * in.D;
      });
    };
    // Two loops, so that each has its loads first.
    if (in.D % width == 0 && left > 0) return each([&] { return from.template vector<Vector>(at); });
    each([&] {
      Vector x = {};
      unrolled<width>([&](int m) {
        if (m < left) x.value[m] = from[at + m];
      });
      return x;
    });
  }

  // Adds this thread's part of the dots of votes and `with`, or begins with it.
  CAPSFAST_DEVICE void add_dots(const Global<const T>& with, const Shared<T>& to, bool begins) const {
    for_vectors(with, [&](int n, const Vector& x) {
      const int at = n * pitch + gpu::thread();
      T dot = begins ? T(0) : T(to[at]);
      unrolled<width>([&](int m) { dot += votes[n][m] * x.value[m]; });
      to[at] = dot;
    });
  }

  // Makes the votes, if they are not there, and this thread's parts of the dots. If there are several pieces, the votes
  // of `piece` are there afterwards.
  CAPSFAST_DEVICE void make_dots(const Scoring<T>& with, bool there) {
    const bool dots = with.V || with.ds;
    for (int n = dots ? 1 : shape.pieces; n <= shape.pieces; ++n) {
      if (!there || shape.pieces > 1) make_votes((piece + n) % shape.pieces);
      if (!active()) continue;
      if (with.V) add_dots(with.V, c, n == 1);
      if (with.ds) add_dots(with.ds, dc, n == 1);
    }
  }

  // The sample and the input capsule whose scores this thread has, and f(output, index of the score) for each score.
  CAPSFAST_DEVICE int score_sample() const { return gpu::thread() / lanes % kSamples; }
  CAPSFAST_DEVICE int score_input() const { return gpu::thread() / lanes / kSamples; }
  CAPSFAST_DEVICE int lane() const { return gpu::thread() % lanes; }
  CAPSFAST_DEVICE int64_t b() const { return b0 + score_sample(); }
  CAPSFAST_DEVICE int64_t i() const { return i0 + score_input(); }
  CAPSFAST_DEVICE bool has_scores() const { return score_sample() < samples && score_input() < inputs; }
  template <class F>
  CAPSFAST_DEVICE void for_scores(const F& f) const {
    const int row = score_sample() * pitch + score_input() * shape.columns();
#pragma unroll 1
    for (int to = lane(); to < outputs && has_scores(); to += lanes) f(to, row + to * shape.runs);
  }

  // Writes votes . V + logits + prior, or -inf for masked entries, to c. If there is ds, also writes votes . ds +
  // dcoupling + dmass to dc. Each thread writes its own scores. make_dots() comes before. Begins with a barrier.
  CAPSFAST_DEVICE void score(const Scoring<T>& with) {
    gpu::barrier();
    const bool valid = has_scores() && in.mask.at(b(), i());
    for_scores([&](int to, int at) {
      const int64_t j = j0 + to;
      T by_V = T(0), by_ds = T(0);
      for (int n = at; n < at + shape.runs; ++n) {
        if (with.V) by_V += c[n];
        if (with.ds) by_ds += dc[n];
      }
      const bool counts = valid && in.out_mask.at(b(), j);
      if (counts) {
        in.logits.add_to(&by_V, b(), i(), j);
        in.prior.add_to(&by_V, b(), j);
        with.dcoupling.add_to(&by_ds, b(), i(), j);
        with.dmass.add_to(&by_ds, b(), j);
      }
      c[at] = counts ? by_V : -Extreme<T>::infinity;
      if (with.ds) dc[at] = counts ? by_ds : T(0);
    });
  }

  // `row` extended by the scores of the tile. Replaces each logit b by exp(b - max).
  CAPSFAST_DEVICE Row<T> extended(const Row<T>& row, bool with_dc) const {
    T max = row.max, sum = T(0), sum_dc = T(0);
    for_scores([&](int, int at) { max = larger<T>(max, c[at]); });
    for (int mask = lanes / 2; mask > 0; mask /= 2) max = larger<T>(max, gpu::shuffle_xor(max, mask));
    for_scores([&](int, int at) {
      const T e = std::exp(c[at] - max);
      c[at] = e;
      sum += e;
      if (with_dc) sum_dc += e * dc[at];
    });
    const T factor = std::exp(row.max - max);
    sum = lane_sum(sum, lanes);
    if (with_dc) sum_dc = lane_sum(sum_dc, lanes);
    return {max, row.scale * factor + sum, row.mean * factor + sum_dc};
  }

  // Turns the scores into c and, in the backward, db = c (dc - mean + dlse), and calls f(output, n) for each score,
  // with index n. Without a given normaliser the tile has all output capsules. Returns the normaliser of the last
  // score. Ends with a barrier.
  template <class F>
  CAPSFAST_DEVICE Row<T> normalise(const Scoring<T>& with, const Normaliser<T>& given, const F& f) const {
    const bool with_dc = static_cast<bool>(with.ds);
    Row<T> row = Row<T>::empty(in);
    if (!given.max) row = extended(row, with_dc).finished();
    for_scores([&](int to, int n) {
      T e = c[n];
      if (given.max) {
        const int64_t at = in.softmax_in ? b() * in.J + j0 + to : b() * in.I + i();
        row = {given.max[at], given.scale[at], with_dc ? given.mean[at] : T(0)};
        e = std::exp(e - row.max);
      }
      const T coupling = e * row.scale;
      c[n] = coupling;
      if (with_dc) {
        T dlse = T(0);
        with.dlse.add_to(&dlse, b(), in.softmax_in ? j0 + to : i());
        const T divided = in.softmax_in && coupling > kWhole<T> ? T(0) : coupling;
        dc[n] = divided * (dc[n] - row.mean) + coupling * dlse;
      }
      f(to, n);
    });
    gpu::barrier();
    return row;
  }
};

}  // namespace capsfast::cuda
