// The general gradient pass of the backward, for all iterations at once: du and dweight, or dvotes, and dlogits.
//
// A block has some input capsules and a split of the samples, and writes their du or dvotes, and dlogits [B, I, J].
// dweight and dlogits [I, J] are sums over samples. Every split has a partial sum, to which no other block adds;
// afterwards the partial sums are added up in a fixed order. With a shared weight every block has a partial sum of
// dweight.
#pragma once

#include "tile.h"

namespace capsfast::cuda {

// A block works on a piece of its tile at a time: components [d0, d0 + components) of the output capsules and [k0, k0 +
// columns) of the input capsules.
template <class T, class E, bool kVotes>
struct Gradient {
  using Size = GradientTile<T>;
  using Scores = Tile<T, E, kVotes, Size>;
  static constexpr int dvotes_from = Scores::elements + Scores::scores,
                       du_from = dvotes_from + Scores::pairs * Size::rows;
  static constexpr int bytes = (du_from + Scores::pairs * Size::columns) * static_cast<int>(sizeof(T));

  const GradientArgs<T>& a;
  const Inputs& in = a.in;
  Scores tile{in};
  int64_t d0 = 0, k0 = 0;
  int components = 0, columns = 0;
  const int64_t most_outputs = Size::outputs_for(in.J, in.D), most_components = Size::components_for(in.D);
  // The samples [b_begin, b_end) of the block's split.
  const int64_t split = gpu::block_y(), tiles = (in.B + kSamples - 1) / kSamples,
                b_begin = tiles * split / gpu::blocks_y() * kSamples,
                b_end = tiles * (split + 1) / gpu::blocks_y() * kSamples;
  Shared<T> dlogits = Scores::array(Scores::elements, Scores::scores);       // [pairs][outputs]
  Shared<T> dvotes = Scores::array(dvotes_from, Scores::pairs* Size::rows);  // [pairs][outputs * components]
  Shared<T> du = Scores::array(du_from, Scores::pairs* Size::columns);       // [pairs][columns]

  // c and db of iteration t and, with_dlogits, dlogits += db.
  CAPSFAST_DEVICE void couple(int64_t t, bool with_dc, bool with_dlogits) const {
    const int64_t vectors = in.B * in.J * in.D;
    const Normaliser<T> norm = a.norm.of(t, in.B * (in.softmax_in ? in.J : in.I));
    Scoring<T> with;
    if (with_dc && t + 1 == a.iterations) with = {{}, {}, a.dcoupling, a.dmass, a.dlse};
    if (t >= a.scored) with.V = a.V.from(t * vectors, vectors);
    if (with_dc) with.ds = a.ds.from(t * vectors, vectors);
    tile.score(with);
    tile.normalise(with, norm, [&](int pair, int out, int n) {
      if (!with_dlogits) return;
      T sum = tile.dc[n];
      if (t > a.first) sum += dlogits[n];
      dlogits[n] = sum;
      if (t + 1 < a.iterations) return;
      a.dlogits_sample.put(sum, tile.sample_of(pair), tile.input_of(pair), tile.j0 + out);
    });
  }

  // dvotes += c ds[t] + db V[t]. Each thread has rows (j, d) of its own.
  CAPSFAST_DEVICE void add_dvotes(int64_t t, bool with_db) const {
    for_each(tile.outputs, components, [&](int out, int d) {
      for (int n = 0; n < tile.samples; ++n) {
        const int64_t b = tile.b0 + n, j = tile.j0 + out, element = ((t * in.B + b) * in.J + j) * in.D + d0 + d;
        const T ds = a.ds[element], V = with_db ? a.V[element] : T(0);
        for (int input = 0; input < tile.inputs; ++input) {
          const int pair = input * kSamples + n, score = pair * Size::outputs + out,
                    to = pair * Size::rows + out * components + d;
          T sum = tile.c[score] * ds;
          if (with_db) sum += tile.dc[score] * V;
          if (t > a.first) sum += dvotes[to];
          dvotes[to] = sum;
          if (!kVotes || t + 1 < a.iterations) continue;
          a.dvotes.put(in.mask.at(b, tile.i0 + input) ? sum : T(0), b, tile.i0 + input, j, d0 + d);
        }
      }
    });
  }

  // dlogits [I, J] += sum over the samples of the tile. The first tile of the split overwrites dlogits.
  CAPSFAST_DEVICE void sum_dlogits() const {
    for_each(tile.inputs, tile.outputs, [&](int input, int out) {
      T sum = T(0);
      for (int n = 0; n < tile.samples; ++n) sum += dlogits[tile.index(input, n, out)];
      double& to = a.dlogits[(split * in.I + tile.i0 + input) * in.J + tile.j0 + out];
      to = (tile.b0 == b_begin ? 0.0 : to) + static_cast<double>(sum);
    });
  }

  // du += sum of dvotes W over the rows (j, d) of the piece.
  CAPSFAST_DEVICE void add_du() const {
    const Global<const E> matrix = in.matrix.data.template as<const E>();
    const bool first = tile.j0 == 0 && d0 == 0, last = tile.j0 + tile.outputs == in.J && d0 + components == in.D;
    tile.for_pairs(columns, [&](int pair, int k) {
      const int64_t b = tile.sample_of(pair), i = tile.input_of(pair);
      T sum = T(0);
      for (int out = 0; out < tile.outputs && in.mask.at(b, i); ++out) {
        const int row = pair * Size::rows + out * components;
        const int64_t from = in.matrix.at(i, tile.j0 + out, d0, k0 + k);
        for (int d = 0; d < components; ++d) sum += dvotes[row + d] * T(matrix[from + d * in.matrix.stride[2]]);
      }
      const int n = pair * Size::columns + k;
      if (!first) sum += du[n];
      du[n] = sum;
      if (last) a.du.put(sum, b, i, k0 + k);
    });
  }

  // dweight += sum of dvotes u over the samples of the tile and, if the weight is shared, over its input capsules.
  CAPSFAST_DEVICE void add_dweight() const {
    const Global<const E> u = in.u.data.template as<const E>();
    const int rows = tile.outputs * components, units = a.shared_weight ? 1 : tile.inputs, each = tile.inputs / units;
    const int64_t part = a.shared_weight ? split * gpu::blocks_x() + gpu::block_x() : split * in.I + tile.i0;
    const bool first = tile.b0 == b_begin && (!a.shared_weight || tile.i0 == gpu::block_x() * Size::inputs);
    for_each(units * rows, columns, [&](int n, int k) {
      const int unit = n / rows, row = n % rows;
      double sum = 0;
      for (int input = unit; input < unit + each; ++input) {
        const int64_t i = tile.i0 + input, from = in.u.at(tile.b0, i, k0 + k);
        T product = T(0);
        for_samples(tile.valid_samples(i), [&](int sample) {
          product += dvotes[(input * kSamples + sample) * Size::rows + row] * T(u[from + sample * in.u.stride[0]]);
        });
        sum += static_cast<double>(product);
      }
      const int64_t j = tile.j0 + row / components, d = d0 + row % components;
      double& to = a.dweight[(((part + unit) * in.J + j) * in.D + d) * in.K + k0 + k];
      to = (first ? 0.0 : to) + sum;
    });
  }

  // All gradients of a piece of a tile: first dvotes of all iterations, then the gradients that follow from dvotes.
  CAPSFAST_DEVICE void add_piece() {
    tile.fit(in.I, most_outputs);
    components = at_most(in.D - d0, most_components);
    columns = at_most(in.K - k0, Size::columns);
    const bool with_dlogits = (a.dlogits || a.dlogits_sample.data) && d0 == 0 && k0 == 0;
    for (int64_t t = a.first; t < a.iterations; ++t) {
      const bool with_db = !a.gradient_last && t >= a.scored;
      couple(t, with_db || with_dlogits, with_dlogits);
      add_dvotes(t, with_db);
      gpu::barrier();
    }
    if (with_dlogits && a.dlogits) sum_dlogits();
    if constexpr (!kVotes) {
      if (a.du.data) add_du();
      if (a.dweight) add_dweight();
    }
    gpu::barrier();
  }
};

template <class T, class E, bool kVotes>
CAPSFAST_KERNEL(kThreads, kBlocksFor<T>)
gradient_kernel(GradientArgs<T> a) {
  using Size = GradientTile<T>;
  Gradient<T, E, kVotes> block{a};
  auto& tile = block.tile;
  for (tile.i0 = gpu::block_x() * Size::inputs; tile.i0 < a.in.I; tile.i0 += gpu::blocks_x() * Size::inputs) {
    for (tile.b0 = block.b_begin; tile.b0 < block.b_end; tile.b0 += kSamples) {
      // With K = 0 or D = 0 there are still couplings, and their logits have a gradient.
      for (block.k0 = 0; block.k0 < larger<int64_t>(a.in.K, 1); block.k0 += Size::columns) {
        for (tile.j0 = 0; tile.j0 < a.in.J; tile.j0 += block.most_outputs) {
          for (block.d0 = 0; block.d0 < larger<int64_t>(a.in.D, 1); block.d0 += block.most_components)
            block.add_piece();
        }
      }
    }
  }
}

}  // namespace capsfast::cuda
