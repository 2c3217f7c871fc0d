// The general gradient pass of the backward, for all iterations at once: du and dweight, or dvotes, and dlogits.
//
// A block has some input capsules and a split of the samples. It writes du or dvotes, and dlogits [B, I, J], of these.
// dweight and dlogits [I, J] are sums over samples: every split has its own, which no other block adds to, and these
// are added up in a fixed order afterwards. With a shared weight every block has its own sum of dweight.
#pragma once

#include "plan.h"
#include "scores.h"

namespace capsfast::cuda {

template <class T>
struct GradientArgs {
  Inputs in;
  int64_t first, iterations;  // iterations [first, iterations) have gradients
  int64_t scored;             // the first one that scores with a V, for the general kernel
  bool gradient_last;
  int64_t outputs, components;     // of a tile
  Global<const T> V, ds;           // [r, B, J, D]; V[t] is what iteration t scored with
  Normaliser<T> norm;              // columns [r, B, J], or rows [r, B, I], absent if a tile has all output capsules
  Operand dcoupling, dmass, dlse;  // as in Scoring
  bool shared_weight;
  Operand du;              // [B, I, K]
  Operand dvotes;          // [B, I, J, D]
  Global<double> dweight;  // [splits, I, J, D, K], or [splits, blocks, J, D, K] for a shared weight
  Operand dlogits_sample;  // [B, I, J], if the logits are [B, I, J]
  Global<double> dlogits;  // [splits, I, J], if the logits are [I, J]
};

template <class T>
struct GradientShared {
  using Size = GradientTile<T>;
  static constexpr int unit = static_cast<int>(sizeof(T));
  static constexpr int scores = Size::pairs * Size::outputs * unit;
  static constexpr int rows_at = 2 * scores, dlogits_at = rows_at + Size::pairs * 4 * unit;
  static constexpr int dvotes_at = dlogits_at + scores, du_at = dvotes_at + Size::pairs * Size::rows * unit;
  static constexpr int bytes = du_at + Size::pairs * Size::columns * unit;
};

// Which components of a tile a block works on at a time: [d0, d0 + components) of the output capsules and
// [k0, k0 + columns) of the input capsules.
struct Piece {
  int64_t d0, k0;
  int components, columns;
};

// dvotes [pair][row] += c ds[t] + db V[t]. Each thread has rows (j, d) of its own.
template <class T>
CAPSFAST_DEVICE void add_gradients(const GradientArgs<T>& a, const Tile& tile, const Piece& piece, int64_t t,
                                   const Scores<T, GradientTile<T>::samples>& scores, bool with_db, Shared<T> dvotes) {
  using Size = GradientTile<T>;
  const Inputs& in = a.in;
  const int rows = tile.outputs * piece.components;
  for (int row = gpu::thread(); row < rows; row += gpu::threads()) {
    const int out = row / piece.components;
    for (int n = 0; n < tile.samples; ++n) {
      const int64_t element =
          (((t * in.B + tile.b0 + n) * in.J) + tile.j0 + out) * in.D + piece.d0 + row % piece.components;
      const T ds = a.ds[element], V = with_db ? a.V[element] : T(0);
      for (int input = 0; input < tile.inputs; ++input) {
        const int at = scores.at(input, n, out), to = (input * Size::samples + n) * Size::rows + row;
        T g = scores.logits[at] * ds;
        if (with_db) g += scores.dc[at] * V;
        dvotes[to] = t == a.first ? g : static_cast<T>(dvotes[to]) + g;
      }
    }
  }
}

template <class T>
CAPSFAST_DEVICE void add_dlogits(const GradientArgs<T>& a, const Tile& tile, int64_t t,
                                 const Scores<T, GradientTile<T>::samples>& scores, Shared<T> dlogits) {
  const int count = tile.inputs * GradientTile<T>::samples * tile.outputs;
  for (int n = gpu::thread(); n < count; n += gpu::threads()) {
    const int pair = n / tile.outputs, at = pair * scores.pitch + n % tile.outputs;
    if (pair % GradientTile<T>::samples >= tile.samples) continue;
    dlogits[at] =
        t == a.first ? static_cast<T>(scores.dc[at]) : static_cast<T>(dlogits[at]) + static_cast<T>(scores.dc[at]);
  }
}

template <class T>
CAPSFAST_DEVICE void write_dlogits(const GradientArgs<T>& a, const Tile& tile, int64_t split, bool first, int pitch,
                                   Shared<T> dlogits) {
  constexpr int kSamples = GradientTile<T>::samples;
  const Inputs& in = a.in;
  for (int n = gpu::thread(); n < tile.inputs * tile.outputs; n += gpu::threads()) {
    const int input = n / tile.outputs, out = n % tile.outputs;
    const int64_t i = tile.i0 + input, j = tile.j0 + out;
    T sum = T(0);
    for (int sample = 0; sample < tile.samples; ++sample) {
      const T value = dlogits[(input * kSamples + sample) * pitch + out];
      sum += value;
      const int64_t* stride = a.dlogits_sample.stride;
      if (a.dlogits_sample.data)
        a.dlogits_sample.template write<T>((tile.b0 + sample) * stride[0] + i * stride[1] + j * stride[2], value);
    }
    if (!a.dlogits) continue;
    double& to = a.dlogits[(split * in.I + i) * in.J + j];
    to = (first ? 0.0 : to) + static_cast<double>(sum);
  }
}

template <class T>
CAPSFAST_DEVICE void write_dvotes(const GradientArgs<T>& a, const Tile& tile, const Piece& piece, Shared<T> dvotes) {
  using Size = GradientTile<T>;
  const int rows = tile.outputs * piece.components, count = tile.inputs * Size::samples * rows;
  for (int n = gpu::thread(); n < count; n += gpu::threads()) {
    const int row = n % rows, pair = n / rows, sample = pair % Size::samples;
    if (sample >= tile.samples) continue;
    const int64_t b = tile.b0 + sample, i = tile.i0 + pair / Size::samples, j = tile.j0 + row / piece.components;
    const int64_t* stride = a.dvotes.stride;
    const T value = a.in.mask.at(b, i) ? static_cast<T>(dvotes[pair * Size::rows + row]) : T(0);
    a.dvotes.template write<T>(
        b * stride[0] + i * stride[1] + j * stride[2] + (piece.d0 + row % piece.components) * stride[3], value);
  }
}

// du [pair][k] += sum of dvotes W over the rows (j, d) of the tile.
template <class T, class E>
CAPSFAST_DEVICE void add_du(const GradientArgs<T>& a, const Tile& tile, const Piece& piece, bool first,
                            Shared<T> dvotes, Shared<T> du) {
  using Size = GradientTile<T>;
  const Global<const E> matrix = a.in.matrix.data.template as<const E>();
  const int64_t* stride = a.in.matrix.stride;
  const int rows = tile.outputs * piece.components;
  for (int n = gpu::thread(); n < tile.inputs * Size::samples * piece.columns; n += gpu::threads()) {
    const int k = n % piece.columns, pair = n / piece.columns, sample = pair % Size::samples;
    if (sample >= tile.samples) continue;
    const int64_t i = tile.i0 + pair / Size::samples;
    T sum = T(0);
    if (a.in.mask.at(tile.b0 + sample, i)) {
      const int64_t from = i * stride[0] + tile.j0 * stride[1] + piece.d0 * stride[2] + (piece.k0 + k) * stride[3];
      for (int row = 0; row < rows; ++row) {
        sum += dvotes[pair * Size::rows + row] *
               widened(matrix[from + row / piece.components * stride[1] + row % piece.components * stride[2]]);
      }
    }
    const int to = pair * Size::columns + k;
    du[to] = first ? sum : static_cast<T>(du[to]) + sum;
  }
}

// dweight += sum of dvotes u over the samples of the tile.
template <class T, class E>
CAPSFAST_DEVICE void add_dweight(const GradientArgs<T>& a, const Tile& tile, const Piece& piece, int64_t split,
                                 bool first, Shared<T> dvotes) {
  using Size = GradientTile<T>;
  const Inputs& in = a.in;
  const Global<const E> u = in.u.data.template as<const E>();
  const int rows = tile.outputs * piece.components, units = a.shared_weight ? 1 : tile.inputs,
            each = a.shared_weight ? tile.inputs : 1;
  const int64_t part = a.shared_weight ? split * gpu::blocks_x() + gpu::block_x() : split * in.I + tile.i0;
  for (int n = gpu::thread(); n < units * rows * piece.columns; n += gpu::threads()) {
    const int k = n % piece.columns, row = n / piece.columns % rows, unit = n / piece.columns / rows;
    double sum = 0;
    for (int input = unit; input < unit + each; ++input) {
      const unsigned valid = valid_samples(in, tile, tile.i0 + input);
      const int64_t from =
          tile.b0 * in.u.stride[0] + (tile.i0 + input) * in.u.stride[1] + (piece.k0 + k) * in.u.stride[2];
      T here = T(0);
      for (int sample = 0; sample < tile.samples; ++sample) {
        if (valid >> sample & 1)
          here +=
              dvotes[(input * Size::samples + sample) * Size::rows + row] * widened(u[from + sample * in.u.stride[0]]);
      }
      sum += static_cast<double>(here);
    }
    const int64_t j = tile.j0 + row / piece.components, d = piece.d0 + row % piece.components;
    double& to = a.dweight[(((part + unit) * in.J + j) * in.D + d) * in.K + piece.k0 + k];
    to = (first ? 0.0 : to) + sum;
  }
}

template <class T>
CAPSFAST_DEVICE void write_du(const GradientArgs<T>& a, const Tile& tile, const Piece& piece, Shared<T> du) {
  using Size = GradientTile<T>;
  for (int n = gpu::thread(); n < tile.inputs * Size::samples * piece.columns; n += gpu::threads()) {
    const int k = n % piece.columns, pair = n / piece.columns;
    if (pair % Size::samples >= tile.samples) continue;
    const int64_t b = tile.b0 + pair % Size::samples, i = tile.i0 + pair / Size::samples;
    const int64_t* stride = a.du.stride;
    a.du.template write<T>(b * stride[0] + i * stride[1] + (piece.k0 + k) * stride[2], du[pair * Size::columns + k]);
  }
}

// Sets what iteration t scores with and its normaliser.
template <class T>
CAPSFAST_DEVICE void at_iteration(const GradientArgs<T>& a, int64_t t, bool with_dc, Scoring<T>* scoring,
                                  Normaliser<T>* norm) {
  const Inputs& in = a.in;
  const int64_t vectors = in.B * in.J * in.D, scalars = in.softmax_in ? in.B * in.J : in.B * in.I;
  *scoring = {};
  *norm = {};
  if (t >= a.scored) scoring->V = a.V.from(t * vectors, vectors);
  if (with_dc) scoring->ds = a.ds.from(t * vectors, vectors);
  if (with_dc && t + 1 == a.iterations) {
    scoring->dcoupling = a.dcoupling;
    scoring->dmass = a.dmass;
    scoring->dlse = a.dlse;
  }
  if (!a.norm.max) return;
  norm->max = a.norm.max.from(t * scalars, scalars);
  norm->scale = a.norm.scale.from(t * scalars, scalars);
  norm->mean = a.norm.mean.from(t * scalars, scalars);
}

// All gradients of a piece of a tile: dvotes of all iterations first, then what follows from them. first_samples and
// first_dweight: sums start here, so memory is overwritten instead of added to.
template <class T, class E, bool kVotes>
CAPSFAST_DEVICE void finish_piece(const GradientArgs<T>& a, const Tile& tile, const Piece& piece, int64_t split,
                                  bool first_samples, bool first_dweight) {
  using Size = GradientTile<T>;
  using Memory = GradientShared<T>;
  const Scores<T, Size::samples> scores{gpu::shared<T>(0, Size::pairs * Size::outputs),
                                        gpu::shared<T>(Memory::scores, Size::pairs * Size::outputs), Size::outputs};
  const Shared<T> rows = gpu::shared<T>(Memory::rows_at, Size::pairs * 3),
                  dlogits = gpu::shared<T>(Memory::dlogits_at, Size::pairs * Size::outputs);
  const Shared<T> dvotes = gpu::shared<T>(Memory::dvotes_at, Size::pairs * Size::rows),
                  du = gpu::shared<T>(Memory::du_at, Size::pairs * Size::columns);
  const bool logits = (a.dlogits || a.dlogits_sample.data) && piece.d0 == 0 && piece.k0 == 0;
  for (int64_t t = a.first; t < a.iterations; ++t) {
    const bool with_db = !a.gradient_last && t >= a.scored, with_dc = with_db || logits;
    Scoring<T> scoring;
    Normaliser<T> norm;
    at_iteration(a, t, with_dc, &scoring, &norm);
    couple<T, E, kVotes>(a.in, tile, scoring, norm, rows, scores);
    if (logits) add_dlogits(a, tile, t, scores, dlogits);
    add_gradients(a, tile, piece, t, scores, with_db, dvotes);
    gpu::barrier();
  }
  if (logits) write_dlogits(a, tile, split, first_samples, Size::outputs, dlogits);
  if constexpr (kVotes) {
    if (a.dvotes.data) write_dvotes(a, tile, piece, dvotes);
  } else {
    if (a.du.data) add_du<T, E>(a, tile, piece, tile.j0 == 0 && piece.d0 == 0, dvotes, du);
    if (a.dweight) add_dweight<T, E>(a, tile, piece, split, first_dweight, dvotes);
  }
  gpu::barrier();
}

template <class T, class E, bool kVotes>
CAPSFAST_KERNEL(kThreads, kBlocksFor<T>)
gradient_kernel(GradientArgs<T> a) {
  using Size = GradientTile<T>;
  const Inputs& in = a.in;
  const Shared<T> du = gpu::shared<T>(GradientShared<T>::du_at, Size::pairs * Size::columns);
  const int64_t split = gpu::block_y(), tiles = (in.B + Size::samples - 1) / Size::samples;
  const int64_t tile_begin = tiles * split / gpu::blocks_y(), tile_end = tiles * (split + 1) / gpu::blocks_y();
  const auto least = [](int64_t a, int64_t b) { return static_cast<int>(a < b ? a : b); };
  Tile tile;
  Piece piece;
  for (tile.i0 = gpu::block_x() * Size::inputs; tile.i0 < in.I; tile.i0 += gpu::blocks_x() * Size::inputs) {
    tile.inputs = least(in.I - tile.i0, Size::inputs);
    for (int64_t b_tile = tile_begin; b_tile < tile_end; ++b_tile) {
      tile.b0 = b_tile * Size::samples;
      tile.samples = least(in.B - tile.b0, Size::samples);
      const bool first_samples = b_tile == tile_begin;
      const bool first_dweight = first_samples && (!a.shared_weight || tile.i0 == gpu::block_x() * Size::inputs);
      // do ... while, because with K = 0 or D = 0 there are still couplings, and their logits have a gradient.
      piece.k0 = 0;
      do {
        piece.columns = least(in.K - piece.k0, Size::columns);
        for (tile.j0 = 0; tile.j0 < in.J; tile.j0 += a.outputs) {
          tile.outputs = least(in.J - tile.j0, a.outputs);
          piece.d0 = 0;
          do {
            piece.components = least(in.D - piece.d0, a.components);
            finish_piece<T, E, kVotes>(a, tile, piece, split, first_samples, first_dweight);
            piece.d0 += a.components;
          } while (piece.d0 < in.D);
        }
        if (!kVotes && a.du.data) write_du(a, tile, piece, du);
        gpu::barrier();
        piece.k0 += Size::columns;
      } while (piece.k0 < in.K && !kVotes);
    }
  }
}

}  // namespace capsfast::cuda
