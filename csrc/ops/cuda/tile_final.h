// The last pass of the backward on tensor cores, for all iterations at once: du, dweight and dlogits.
//
// A block has 16 samples at a time and a split of the input capsules; a warp has 32 columns (j, d), as in tile.h. V and
// ds of all iterations are in shared memory. For each input capsule a block computes the votes, their dot products, and
// the softmaxes of all iterations. Then dvotes = sum_t c_t ds_t + db_t V_{t-1} takes the registers of the votes, and
// two more products give du = dvotes W and dweight = dvotes^T u.
//
// A block walks over the tiles of samples of one part of the batch. It writes their du. Each part of the batch has its
// own sum of dweight (each block, if the weight is shared), so no two blocks add to one number; these sums are added up
// in a fixed order afterwards.
#pragma once

#include "tile.h"

namespace capsfast::cuda {

struct TileFinalArgs {
  Inputs in;
  int64_t first, iterations;  // iterations [first, iterations) have gradients
  bool gradient_last, in_runs, tf32;
  Global<const float> V, ds;  // [r, B, J, D]; V[t] is what iteration t scored with, V[0] = 0
  Normaliser<float> norm;     // [r, B, J], softmax over the input capsules
  Operand dcoupling;          // [B, I, J]
  bool shared_weight;
  Operand du;              // [B, I, K]
  Global<float> dweight;   // [parts, I, J, D, K], or [parts, splits, J, D, K] for a shared weight
  Operand dlogits_sample;  // [B, I, J], if the logits are [B, I, J]
  Global<double> dlogits;  // [parts, I, J], if the logits are [I, J]
};

template <class E, int kK, int kD>
struct FinalTiles : Tiles<E, kK, kD, true, false> {
  using Base = Tiles<E, kK, kD, true, false>;
  static constexpr int inputs = 4;  // fewer than in the other passes, as V and ds of all iterations need the memory
  static constexpr int poses = inputs * Base::pose_pitch;
  static constexpr int turn =
      TileSize::columns + 8;  // floats between samples of a warp's dvotes in shared memory: lanes read different banks
  static constexpr int k_tiles = kK == 16 ? 2 : 1;

  // Where the arrays of a block begin, in floats. They follow each other.
  struct Memory {
    int V, ds, high, low, scores, dc, columns, turned, du, end;
  };
  static CAPSFAST_HOST_DEVICE Memory memory(int J, int threads, int terms, bool softmax_in) {
    Memory at;
    const int vectors = Base::vectors(threads), warps = threads / 32;
    at.V = 0;
    at.ds = at.V + terms * vectors;
    at.high = at.ds + terms * vectors;
    at.low = at.high + (Base::parted ? poses : 0);
    at.scores = at.low + poses;
    at.dc = at.scores + terms * Base::scores(J);
    at.columns = at.dc + terms * Base::scores(J);
    at.turned = at.columns + (softmax_in ? 2 * terms * Base::scores(J) : 0);
    at.turned += at.turned & 1;  // aligned for pairs
    at.du = at.turned + warps * Base::samples * turn;
    at.end = at.du + warps * Base::samples * kK;
    return at;
  }
};

// Splits operands that are not TF32 numbers into two TF32 parts. With kOne `high` is the nearest TF32 number and `low`
// is not set.
template <bool kOne, int kCount>
CAPSFAST_DEVICE void take_parts(const float (&x)[kCount], float (&high)[kCount], float (&low)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    if constexpr (kOne) {
      high[n] = gpu::to_tf32(x[n]);
    } else {
      two_parts(x[n], high[n], low[n]);
    }
  }
}

// c += a b. kLeft: a has two parts. kRight: b has two parts.
template <bool kLeft, bool kRight>
CAPSFAST_DEVICE void multiply(float (&c)[4], const float (&a_high)[4], const float (&a_low)[4],
                              const float (&b_high)[2], const float (&b_low)[2]) {
  if constexpr (kLeft) gpu::mma_tf32(c, a_low, b_high);
  if constexpr (kRight) gpu::mma_tf32(c, a_high, b_low);
  gpu::mma_tf32(c, a_high, b_high);
}

// dvotes = sum_t c_t ds_t + db_t V_{t-1}, in the accumulator layout; 0 for masked input capsules.
template <class Tr>
CAPSFAST_DEVICE void combine(const TileFinalArgs& a, int b0, int i, const Lane& lane, int size, int vectors,
                             Shared<float> V, Shared<float> ds, Shared<float> scores, Shared<float> dc,
                             Accumulator (&dvotes)[1][Tr::column_tiles]) {
  const int terms = static_cast<int>(a.iterations - a.first);
#pragma unroll
  for (int tile = 0; tile < Tr::column_tiles; ++tile)
    dvotes[0][tile][0] = dvotes[0][tile][1] = dvotes[0][tile][2] = dvotes[0][tile][3] = 0.0f;
#pragma unroll
  for (int eight = 0; eight < 2; ++eight) {
    const int sample = eight * 8 + lane.group;
    if (b0 + sample >= a.in.B || !a.in.mask.at(b0 + sample, i)) continue;
    for (int term = 0; term < terms; ++term) {
      const bool with_db = !a.gradient_last && a.first + term > 0;
#pragma unroll
      for (int out = 0; out < Tr::outputs; ++out) {
        const int j = lane.warp * Tr::outputs + out, at = term * size + j * Tr::score_pitch + sample;
        if (j >= a.in.J) continue;
        const float c = scores[at], db = with_db ? static_cast<float>(dc[at]) : 0.0f;
        each_component<Tr>(ds, term * vectors, lane, out, eight,
                           [&](int tile, int n, float x) { dvotes[0][tile][2 * eight + n] += c * x; });
        if (with_db)
          each_component<Tr>(V, term * vectors, lane, out, eight,
                             [&](int tile, int n, float x) { dvotes[0][tile][2 * eight + n] += db * x; });
      }
    }
  }
}

// The warp's part of du [16, K] = dvotes W, a sum over columns. A product may take these in any order: a lane's columns
// 2 quad and 2 quad + 1 of the accumulator become k = quad and quad + 4 of the operand, so no lane passes dvotes on.
template <class Tr, class E, bool kOne>
CAPSFAST_DEVICE void product_du(const Inputs& in, int i, const Lane& lane,
                                const Accumulator (&dvotes)[1][Tr::column_tiles], Shared<float> du) {
  const Global<const E> weight = in.matrix.data.as<const E>();
  const int columns = static_cast<int>(in.J) * Tr::D;
  float c[Tr::k_tiles][4] = {};
#pragma unroll
  for (int tile = 0; tile < Tr::column_tiles; ++tile) {
    const int column = lane.warp * TileSize::columns + tile * 8 + 2 * lane.quad;
    const float g[4] = {dvotes[0][tile][0], dvotes[0][tile][2], dvotes[0][tile][1], dvotes[0][tile][3]};
    float g_high[4], g_low[4];
    take_parts<kOne>(g, g_high, g_low);
#pragma unroll
    for (int k_tile = 0; k_tile < Tr::k_tiles; ++k_tile) {
      const int k = k_tile * 8 + lane.group;
      float w[2] = {}, w_low[2];
      if (column < columns && k < Tr::K) {
        const int64_t from = i * in.matrix.stride[0] + column * Tr::K + k;
        w[0] = wide(weight[from]);
        w[1] = wide(weight[from + Tr::K]);
      }
      if constexpr (Tr::parted) take_parts<kOne>(w, w, w_low);
      multiply<!kOne, Tr::parted && !kOne>(c[k_tile], g_high, g_low, w, w_low);
    }
  }
#pragma unroll
  for (int k_tile = 0; k_tile < Tr::k_tiles; ++k_tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int sample = lane.group + n / 2 * 8, column = k_tile * 8 + 2 * lane.quad + n % 2;
      if (column < Tr::K) du[(lane.warp * Tr::samples + sample) * Tr::K + column] = c[k_tile][n];
    }
  }
}

// dweight [32, K] += dvotes^T u for the warp's columns, a sum over samples. Lanes need other elements of dvotes for it
// than they have, so these go through shared memory of the warp, turned [16 samples][turn].
template <class Tr, bool kOne>
CAPSFAST_DEVICE void product_dweight(int input, const Lane& lane, const Accumulator (&dvotes)[1][Tr::column_tiles],
                                     Shared<float> high, Shared<float> low, Shared<float> turned,
                                     float (&dweight)[2][Tr::k_tiles][4]) {
  const int base = lane.warp * Tr::samples * Tr::turn;
#pragma unroll
  for (int tile = 0; tile < Tr::column_tiles; ++tile) {
#pragma unroll
    for (int n = 0; n < 4; ++n)
      turned[base + (lane.group + n / 2 * 8) * Tr::turn + tile * 8 + 2 * lane.quad + n % 2] = dvotes[0][tile][n];
  }
  gpu::warp_barrier();
  // Poses of samples quad and quad + 4. Each is the first of a pair, whose second is the sample 8 further on, for the
  // second step of the product.
  gpu::Pair u_high[Tr::k_tiles][2] = {}, u_low[Tr::k_tiles][2] = {};
#pragma unroll
  for (int k_tile = 0; k_tile < Tr::k_tiles; ++k_tile) {
    const int k = k_tile * 8 + lane.group;
#pragma unroll
    for (int n = 0; n < 2 && k < Tr::K; ++n) {
      const int at = pose_at<Tr>(input, lane.quad + 4 * n, k);
      u_high[k_tile][n] = high.pair(at);
      if constexpr (Tr::parted && !kOne) u_low[k_tile][n] = low.pair(at);
    }
  }
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const int sample = step * 8 + lane.quad;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float g[4], g_high[4], g_low[4];
#pragma unroll
      for (int n = 0; n < 4; ++n)
        g[n] = turned[base + (sample + n / 2 * 4) * Tr::turn + half * 16 + lane.group + n % 2 * 8];
      take_parts<kOne>(g, g_high, g_low);
#pragma unroll
      for (int k_tile = 0; k_tile < Tr::k_tiles; ++k_tile) {
        const auto of_step = [&](const gpu::Pair& pair) { return step == 0 ? pair.first : pair.second; };
        const float b_high[2] = {of_step(u_high[k_tile][0]), of_step(u_high[k_tile][1])},
                    b_low[2] = {of_step(u_low[k_tile][0]), of_step(u_low[k_tile][1])};
        multiply<!kOne, Tr::parted && !kOne>(dweight[half][k_tile], g_high, g_low, b_high, b_low);
      }
    }
  }
}

template <class Tr>
CAPSFAST_DEVICE void write_dweight(const TileFinalArgs& a, int64_t part, bool first, const Lane& lane,
                                   const float (&dweight)[2][Tr::k_tiles][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k_tile = 0; k_tile < Tr::k_tiles; ++k_tile) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int column = lane.warp * TileSize::columns + half * 16 + lane.group + n / 2 * 8,
                  k = k_tile * 8 + 2 * lane.quad + n % 2;
        if (column >= a.in.J * Tr::D || k >= Tr::K) continue;
        float& to = a.dweight[(part * a.in.J * Tr::D + column) * Tr::K + k];
        to = first ? dweight[half][k_tile][n] : to + dweight[half][k_tile][n];
      }
    }
  }
}

template <class Tr>
CAPSFAST_DEVICE void write_tile_dlogits(const TileFinalArgs& a, int b0, int i, bool first, int size, Shared<float> dc) {
  const Inputs& in = a.in;
  const int terms = static_cast<int>(a.iterations - a.first);
  for (int j = gpu::thread(); j < in.J; j += gpu::threads()) {
    double sum = 0;
    for (int sample = 0; sample < Tr::samples && b0 + sample < in.B; ++sample) {
      float value = 0.0f;
      for (int term = 0; term < terms; ++term) value += dc[term * size + j * Tr::score_pitch + sample];
      sum += static_cast<double>(value);
      const int64_t* stride = a.dlogits_sample.stride;
      if (a.dlogits_sample.data)
        a.dlogits_sample.template write<float>((b0 + sample) * stride[0] + i * stride[1] + j * stride[2], value);
    }
    if (!a.dlogits) continue;
    double& to = a.dlogits[(gpu::block_x() * in.I + i) * in.J + j];
    to = first ? sum : to + sum;
  }
}

// Adds up the parts of du that the warps have computed, and writes it.
template <class Tr>
CAPSFAST_DEVICE void write_tile_du(const TileFinalArgs& a, int b0, int i, Shared<float> du) {
  const int warps = gpu::threads() / 32;
  for (int n = gpu::thread(); n < Tr::samples * Tr::K; n += gpu::threads()) {
    const int64_t b = b0 + n / Tr::K;
    if (b >= a.in.B) continue;
    float sum = 0.0f;
    for (int warp = 0; warp < warps; ++warp) sum += du[warp * Tr::samples * Tr::K + n];
    if (!a.in.mask.at(b, i)) sum = 0.0f;
    a.du.template write<float>(b * a.du.stride[0] + i * a.du.stride[1] + n % Tr::K * a.du.stride[2], sum);
  }
}

template <class E, int kK, int kD>
CAPSFAST_KERNEL(32 * TileSize::final_warps, 1)
tile_final_kernel(TileFinalArgs a) {
  using Tr = FinalTiles<E, kK, kD>;
  const Inputs& in = a.in;
  const Lane lane = this_lane();
  const int J = static_cast<int>(in.J), size = Tr::scores(J), vectors = Tr::vectors(gpu::threads());
  const int terms = static_cast<int>(a.iterations - a.first), warps = gpu::threads() / 32;
  const typename Tr::Memory at = Tr::memory(J, gpu::threads(), terms, in.softmax_in);
  const Shared<float> V = gpu::shared<float>(4 * at.V, terms * vectors),
                      ds = gpu::shared<float>(4 * at.ds, terms * vectors);
  const Shared<float> high = gpu::shared<float>(4 * at.high, Tr::poses),
                      low = gpu::shared<float>(4 * at.low, Tr::poses);
  const Shared<float> scores = gpu::shared<float>(4 * at.scores, terms * size),
                      dc = gpu::shared<float>(4 * at.dc, terms * size);
  const Shared<float> turned = gpu::shared<float>(4 * at.turned, warps * Tr::samples * Tr::turn);
  const Shared<float> du = gpu::shared<float>(4 * at.du, warps * Tr::samples * Tr::K);
  const int64_t scalars = in.B * in.J;
  const auto columns = [&](int term) {
    const int from = in.softmax_in ? at.columns + 2 * term * size : 0;
    return Columns{gpu::shared<float>(4 * from, size), gpu::shared<float>(4 * (from + size), size),
                   a.norm.mean.from((a.first + term) * scalars, scalars)};
  };
  const SoftmaxSet softmax{terms, size, terms - 1, {}, a.dcoupling};
  // Parts of the batch are the fast axis of the grid: blocks that read the same weights are neighbours.
  const int64_t part = gpu::block_x(), parts = gpu::blocks_x(), split = gpu::block_y(), all = in.B * in.J * Tr::D;
  const int64_t i_begin = in.I * split / gpu::blocks_y(), i_end = in.I * (split + 1) / gpu::blocks_y();
  float dweight[2][Tr::k_tiles][4] = {};
  for (int64_t b0 = part * Tr::samples; b0 < in.B; b0 += parts * Tr::samples) {
    const bool first = b0 == part * Tr::samples;
    for (int term = 0; term < terms; ++term) {
      const int64_t t = a.first + term;
      if (t > 0) stage_vectors<Tr>(in, a.V.from(t * all, all), b0, lane, V, term * vectors);
      stage_vectors<Tr>(in, a.ds.from(t * all, all), b0, lane, ds, term * vectors);
      if (in.softmax_in)
        stage_columns<Tr>(in, a.norm.max.from(t * scalars, scalars), a.norm.scale.from(t * scalars, scalars), b0, lane,
                          columns(term));
    }
    for (int64_t i0 = i_begin; i0 < i_end; i0 += Tr::inputs) {
      const int inputs = static_cast<int>(i_end - i0 < Tr::inputs ? i_end - i0 : Tr::inputs);
      gpu::barrier();
      stage_poses<Tr, E>(in, a.in_runs, a.tf32, b0, i0, inputs, lane, high, low);
      gpu::barrier();
      for (int input = 0; input < inputs; ++input) {
        const int64_t i = i0 + input;
        Accumulator votes[1][Tr::column_tiles];
        {
          float weight[Tr::column_tiles][Tr::values];
          fetch_weight<Tr, E>(in, weight_at<Tr>(in, i, lane), lane, weight);
          make_votes<Tr>(weight, a.tf32, high, low, input, lane, votes);
          drop_masked<Tr>(in, b0, i, lane, votes);
        }
        for (int term = 0; term < terms; ++term) {
          float with_V[Tr::outputs] = {}, with_ds[Tr::outputs];
          if (a.first + term > 0) dot<Tr>(votes, V, term * vectors, lane, with_V);
          dot<Tr>(votes, ds, term * vectors, lane, with_ds);
          write_scores<Tr>(with_V, lane, J, term * size, scores);
          write_scores<Tr>(with_ds, lane, J, term * size, dc);
          if (in.softmax_in)
            softmax_columns<Tr>(
                in, columns(term), term + 1 == terms, a.dcoupling, {}, b0, i, lane, term * size, scores, dc);
        }
        gpu::barrier();
        if (!in.softmax_in) {
          softmax_rows<Tr, true>(in, softmax, b0, i, lane, 0, scores, dc);
          gpu::barrier();
        }
        if (a.dlogits || a.dlogits_sample.data) write_tile_dlogits<Tr>(a, b0, i, first, size, dc);
        combine<Tr>(a, b0, i, lane, size, vectors, V, ds, scores, dc, votes);
        const auto products = [&](auto one) {
          if (a.du.data) product_du<Tr, E, decltype(one)::value>(in, i, lane, votes, du);
          if (a.dweight) product_dweight<Tr, decltype(one)::value>(input, lane, votes, high, low, turned, dweight);
        };
        if constexpr (Tr::parted) {
          a.tf32 ? products(std::true_type()) : products(std::false_type());
        } else {
          products(std::false_type());  // u and W need no split, but dvotes are float32
        }
        if (a.dweight && !a.shared_weight) {
          write_dweight<Tr>(a, part * in.I + i, first, lane, dweight);
#pragma unroll
          for (int n = 0; n < 2 * Tr::k_tiles * 4; ++n)
            dweight[n / (Tr::k_tiles * 4)][n / 4 % Tr::k_tiles][n % 4] = 0.0f;
        }
        gpu::barrier();
        if (a.du.data) write_tile_du<Tr>(a, b0, i, du);
      }
    }
  }
  if (a.dweight && a.shared_weight) write_dweight<Tr>(a, part * gpu::blocks_y() + split, true, lane, dweight);
}

}  // namespace capsfast::cuda
