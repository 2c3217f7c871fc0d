// The general gradient pass of the backward, for all iterations at once: du and dweight, or dvotes, and dlogits.
//
// A block has some input capsules and a split of the samples, and writes their du or dvotes, and dlogits [B, I, J].
// dweight and dlogits [I, J] are sums over samples. Every split has a partial sum, to which no other block adds;
// afterwards the partial sums are added up in a fixed order. With a shared weight every block has a partial sum of
// dweight.
#pragma once

#include <algorithm>

#include "tile.h"

namespace capsfast::cuda {

// A thread has the votes and dvotes of a tile in registers, for all iterations. A block sums dvotes W for components
// [k0, k_end) of the poses: as many as fit shared memory.
template <class T, class E, bool kVotes>
struct Gradient {
  using Votes = Tile<T, E, kVotes>;
  using Vector = typename Votes::Vector;
  static constexpr int width = Votes::width, most_du = kVotes ? 0 : 512;
  // Shared memory, in elements. dvotes of a tile lie where its scores were.
  static constexpr int dlogits_from = Votes::elements, staged_dvotes = kVotes ? 0 : kSamples * kThreads * width,
                       dweight_from = Votes::scores_from + std::max(3 * Votes::scores, staged_dvotes),
                       du_from = dweight_from + (kVotes ? 0 : Votes::most_weights);
  static constexpr int bytes = (du_from + most_du) * static_cast<int>(sizeof(T));

  const GradientArgs<T>& a;
  const Inputs& in = a.in;
  Votes tile{in};
  T dvotes[kSamples][width] = {};
  const bool whole = tile.shape.whole(in.J);  // a tile has all terms of its du
  const int64_t columns = whole ? in.K : most_du / (kSamples * tile.shape.inputs) / Votes::staged * Votes::staged;
  int64_t k0 = 0, k_end = 0;
  // The samples [b_begin, b_end) of the block's split.
  const int64_t split = gpu::block_y(), tiles = (in.B + kSamples - 1) / kSamples,
                b_begin = tiles * split / gpu::blocks_y() * kSamples,
                b_end = tiles * (split + 1) / gpu::blocks_y() * kSamples;
  Shared<T> dlogits = Votes::array(dlogits_from, Votes::scores);                     // as c
  Shared<T> dvotes_staged = Votes::array(Votes::scores_from, staged_dvotes);         // [samples][threads], runs
  Shared<T> dweight = Votes::array(dweight_from, kVotes ? 0 : Votes::most_weights);  // as tile.weights
  Shared<T> du = Votes::array(du_from, most_du);                                     // [input][sample][columns]

  // c and db of iteration t and, with_dlogits, dlogits += db.
  CAPSFAST_DEVICE void couple(int64_t t, bool with_dc, bool with_dlogits) {
    const int64_t vectors = in.B * in.J * in.D;
    const Normaliser<T> norm = a.norm.of(t, in.B * (in.softmax_in ? in.J : in.I));
    Scoring<T> with;
    if (with_dc && t + 1 == a.iterations) with = {{}, {}, a.dcoupling, a.dmass, a.dlse};
    if (t >= a.scored) with.V = a.V.from(t * vectors, vectors);
    if (with_dc) with.ds = a.ds.from(t * vectors, vectors);
    tile.make_dots(with, t > a.start);
    tile.score(with);
    tile.normalise(with, norm, [&](int out, int n) {
      if (!with_dlogits) return;
      T sum = tile.dc[n];
      if (t > a.start) sum += dlogits[n];
      dlogits[n] = sum;
      if (t + 1 == a.iterations) a.dlogits_sample.put(sum, tile.b(), tile.i(), tile.j0 + out);
    });
  }

  // dvotes += c ds[t] + db V[t].
  CAPSFAST_DEVICE void add_dvotes(int64_t t, bool with_db) {
    const int64_t vectors = in.B * in.J * in.D;
    if (!tile.active()) return;
    const auto add = [&](const Shared<T>& weights, const Global<const T>& of) {
      tile.for_vectors(of.from(t * vectors, vectors), [&](int n, const Vector& x) {
        const T weight = n < tile.samples ? T(weights[n * Votes::pitch + tile.slot()]) : T(0);
        unrolled<width>([&](int m) { dvotes[n][m] += weight * x.value[m]; });
      });
    };
    add(tile.c, a.ds);
    if (with_db) add(tile.dc, a.V);
  }

  // dlogits [I, J] += sum over the samples of the tile. The first tile of the split overwrites dlogits.
  CAPSFAST_DEVICE void sum_dlogits() const {
    if (!tile.active() || tile.d_run != 0) return;
    T sum = T(0);
    for (int n = 0; n < tile.samples; ++n) sum += dlogits[n * Votes::pitch + tile.slot()];
    double& to = a.dlogits[(split * in.I + tile.i0 + tile.input) * in.J + tile.j0 + tile.out];
    to = (tile.b0 == b_begin ? 0.0 : to) + static_cast<double>(sum);
  }

  CAPSFAST_DEVICE void put_dvotes() const {
    if (!tile.active()) return;
    const auto to = a.dvotes.data.template as<E>();
    Votes::for_votes([&](int n, int m) {
      const int64_t d = tile.component() + m;
      if (n < tile.samples && d < in.D)
        to[a.dvotes.at(tile.b0 + n, tile.i0 + tile.input, tile.j0 + tile.out, d)] = narrowed<E>(dvotes[n][m]);
    });
  }

  // du += dvotes W for the staged components, from k on. begins, ends: this tile is the first, the last that adds to
  // its du.
  CAPSFAST_DEVICE void add_du(int64_t k, bool begins, bool ends) const {
    constexpr int kLanes = 8;
    const int lane = gpu::thread() % kLanes, step = tile.shape.columns();
    for (int n = gpu::thread() / kLanes; n < tile.inputs * Votes::staged_runs * kSamples; n += kThreads / kLanes) {
      const int sample = n % kSamples, run = n / kSamples % Votes::staged_runs,
                input = n / kSamples / Votes::staged_runs;
      Vector sum = {};
      for (int column = lane; column < tile.outputs * tile.shape.runs; column += kLanes) {
        const int thread = input * step + column;
        const Vector dvote = dvotes_staged.template vector<Vector>((sample * kThreads + thread) * width);
        unrolled<width>([&](int m) {
          const Vector w = tile.weights.template vector<Vector>(tile.place(run, m, thread));
          unrolled<width>([&](int n) { sum.value[n] += dvote.value[m] * w.value[n]; });
        });
      }
      unrolled<width>([&](int m) { sum.value[m] = lane_sum(sum.value[m], kLanes); });
      if (lane != 0 || sample >= tile.samples) continue;
      const int64_t b = tile.b0 + sample, i = tile.i0 + input, from = k + run * width;
      const int at = (input * kSamples + sample) * static_cast<int>(columns) + static_cast<int>(from - k0);
      unrolled<width>([&](int m) {
        if (from + m >= k_end) return;
        if (!begins) sum.value[m] += du[at + m];
        if (!ends) du[at + m] = sum.value[m];
        if (ends) a.du.put(in.mask.at(b, i) ? sum.value[m] : T(0), b, i, from + m);
      });
    }
  }

  // dweight += dvotes u, summed over the samples and, if the weight is shared, the input capsules of the tile. Sums of
  // several tiles are in T before they go to memory, if the tiles have the same weights. Begins with a barrier.
  CAPSFAST_DEVICE void add_dweight(int64_t k) const {
    const int64_t tile_of_split = (tile.b0 - b_begin) / kSamples;
    const int tiles_in_T = tile.weights_stay ? kTilesInT : 1, n_in_T = static_cast<int>(tile_of_split % tiles_in_T);
    for (int run = 0, end = tile.runs_from(k); run < end; ++run) {
      Vector sum[width] = {};
      unrolled<width>([&](int m) {
        if (n_in_T > 0) sum[m] = dweight.template vector<Vector>(tile.place(run, m, gpu::thread()));
      });
      unrolled<kSamples>([&](int n) {
        const Vector u = tile.pose(n, run);
        Votes::for_square([&](int m, int k) { sum[m].value[k] += dvotes[n][m] * u.value[k]; });
      });
      unrolled<width>([&](int m) { dweight.write(tile.place(run, m, gpu::thread()), sum[m]); });
    }
    if (n_in_T + 1 < tiles_in_T && tile.b0 + kSamples < b_end) return;
    gpu::barrier();
    // A shared weight has one sum, to which all input capsules of the tile add.
    const int sums = a.shared_weight ? 1 : tile.inputs, terms = tile.inputs / sums, step = tile.shape.columns() * width;
    const int64_t part = a.shared_weight ? split * gpu::blocks_x() + gpu::block_x() : split * in.I + tile.i0;
    const bool overwrites =
        tile_of_split < tiles_in_T && (!a.shared_weight || tile.i0 == gpu::block_x() * tile.shape.inputs);
    for (int of = 0; of < sums; ++of) {
      const int64_t from = k + Votes::k_run() * width,
                    row = (((part + of) * in.J + tile.j0) * in.D + tile.d0) * in.K + from;
      tile.for_weights(of, in.D * in.K, in.K, [&](int at, int64_t offset, bool there) {
        for (int m = 0; m < width && there && from + m < k_end; ++m) {
          double sum = 0;
          for (int n = 0; n < terms; ++n) sum += static_cast<double>(dweight[at + n * step + m]);
          double& to = a.dweight[row + offset + m];
          to = (overwrites ? 0.0 : to) + sum;
        }
      });
    }
  }

  // All gradients of a tile: first dvotes of all iterations, then the gradients that follow from dvotes.
  CAPSFAST_DEVICE void add_tile() {
    tile.fit(in.I);
    Votes::for_votes([&](int n, int m) { dvotes[n][m] = T(0); });
    const bool with_dlogits = (a.dlogits || a.dlogits_sample.data) && tile.piece == 0 && k0 == 0;
    for (int64_t t = a.start; t < a.iterations; ++t) {
      const bool with_db = !a.gradient_last && t >= a.scored;
      couple(t, with_db || with_dlogits, with_dlogits);
      add_dvotes(t, with_db);
      gpu::barrier();
    }
    tile.clear_masked(dvotes);
    if (with_dlogits && a.dlogits) {
      sum_dlogits();
      gpu::barrier();
    }
    if constexpr (kVotes) {
      if (a.dvotes.data) put_dvotes();
    } else {
      const bool begins = tile.j0 == 0 && tile.piece == 0,
                 ends = tile.j0 + tile.outputs == in.J && tile.piece + 1 == tile.shape.pieces;
      Votes::put_runs(dvotes_staged, dvotes);
      for (int64_t k = k0; k < k_end; k += Votes::staged) {
        if (tile.weights_stay) {
          gpu::barrier();
        } else {
          tile.stage(k);
        }
        if (a.du.data) add_du(k, begins, ends);
        if (a.dweight) add_dweight(k);
      }
    }
  }
};

template <class T, class E, bool kVotes>
CAPSFAST_KERNEL(kThreads, kGradientBlocks)
gradient_kernel(GradientArgs<T> a) {
  Gradient<T, E, kVotes> block{a};
  auto& tile = block.tile;
  const int step = tile.shape.inputs;
  tile.weights_stay = block.whole && Gradient<T, E, kVotes>::Votes::staged >= a.in.K;
  for (tile.i0 = gpu::block_x() * step; tile.i0 < a.in.I; tile.i0 += gpu::blocks_x() * step) {
    tile.weights_staged = false;
    for (tile.b0 = block.b_begin; tile.b0 < block.b_end; tile.b0 += kSamples) {
      // With K = 0 there are still couplings, and their logits have a gradient. Given votes need one turn.
      block.k_end = 0;
      do {
        block.k0 = block.k_end;
        block.k_end = kVotes ? a.in.K : block.k0 + at_most(a.in.K - block.k0, block.columns);
        for (tile.j0 = 0; tile.j0 < a.in.J; tile.j0 += tile.shape.outputs) {
          for (tile.piece = 0; tile.piece < tile.shape.pieces; ++tile.piece) block.add_tile();
        }
      } while (block.k_end < a.in.K);
    }
  }
}

}  // namespace capsfast::cuda
