// The gradient pass of the backward, for all iterations at once: du, dweight and dlogits, on tensor cores, with the
// mapping of accumulate.h. For each input capsule of its samples a warp makes the votes and dvotes = sum_t c_t ds_t +
// db_t V_{t-1}, one iteration after the other; du = dvotes W is its own. dweight = dvotes^T u is a sum over samples:
// the warps of a block that share an input capsule leave theirs in shared memory, and a thread for each element adds
// them up in a fixed order and to memory.
//
// Blocks are no clusters here, which could add up more before it goes to memory: a barrier of a cluster empties the L1
// cache, where V and ds are.
#pragma once

#include "accumulate.h"

namespace capsfast::cuda::rows {

struct GradientArgs {
  Inputs in;
  int first, iterations;  // iterations [first, iterations) have gradients
  bool gradient_last, shared_weight;
  int zero;                   // as in Pass
  VectorOrder order;          // of V and ds
  Global<const float> V, ds;  // [r, B, J, D]; V[t] is what iteration t scored with, V[0] = 0
  Normaliser<float> norm;     // [r, B, J], softmax over the input capsules
  Operand dcoupling;          // [B, I, J]
  Operand du;                 // [B, I, K], contiguous
  Global<float> dweight;      // [parts, I, J, D, K], or [parts, splits, J, D, K] for a shared weight
  Operand dlogits_sample;     // [B, I, J], if the logits are [B, I, J]
  Global<double> dlogits;     // [parts, I, J], if the logits are [I, J]
  Shape shape;                // chunk == streams
  InPieces in_pieces;
};

// Shared memory of a block, in floats from `turned` on; what comes before is ChunkMemory.
template <class Tr>
struct GradientMemory {
  // A warp turns dvotes around two tiles at a time: [16 columns][16 samples], with space that keeps lanes in different
  // banks.
  static constexpr int pitch = kSamples + 4, turn = 16 * pitch;

  int turned;   // [warps][turn]
  int sums;     // [warps][Tr::weight_part]
  int dlogits;  // [warps][Tr::outputs]
  int end;

  CAPSFAST_HOST_DEVICE GradientMemory(const Inputs& in, const Shape& shape, bool with_dlogits) {
    turned = chunk_memory<Tr>(in, shape).end / 4;
    sums = turned + shape.warps() * turn;
    dlogits = sums + shape.warps() * Tr::weight_part;
    end = dlogits + (with_dlogits ? shape.warps() * Tr::outputs : 0);
  }
};

// dvotes of a warp's samples for one input capsule, in place of the votes; `dlogits` sums db over the iterations.
template <class Tr>
CAPSFAST_DEVICE void make_dvotes(const GradientArgs& a, const ThreadCoord& at, const ScoreCoord& of, unsigned counts,
                                 const Accumulator (&votes)[Tr::tiles], Accumulator (&dvotes)[Tr::tiles],
                                 Scores<Tr>& dlogits) {
  const Inputs& in = a.in;
  const int64_t all = a.order.size(in.B), scalars = in.B * in.J;
  int64_t vectors = static_cast<int64_t>(of.b0 / kSamples) * Tr::vectors + a.first * all;
  clear<Tr>(dvotes);
#pragma unroll 1
  for (int t = a.first; t < a.iterations; ++t, vectors += all) {
    // V of iteration 0 is 0, so votes do not depend on its db, which only dlogits need.
    const bool with_db = t > 0 && !a.gradient_last;
    const ScoreCoord here{of.b0 + t * a.zero, of.i};
    Scores<Tr> b, dc;
    if (Tr::plain && t == 0) {
#pragma unroll
      for (int slot = 0; slot < Tr::slots; ++slot) b[slot][0] = b[slot][1] = 1.0f / static_cast<float>(in.J);
    } else {
      if (t > 0) {
        dot<Tr>(votes, lane_vectors<Tr>(a.V, vectors, at), b);
      } else {
#pragma unroll
        for (int slot = 0; slot < Tr::slots; ++slot) b[slot][0] = b[slot][1] = 0.0f;
      }
      dot<Tr>(votes, lane_vectors<Tr>(a.ds, vectors, at), dc);
      if constexpr (!Tr::plain) apply_options<Tr, true>(in, a.dcoupling, t + 1 == a.iterations, at, here, b, dc);
      if constexpr (Tr::in) {
        softmax_known<Tr, true>(in,
                                {a.norm.max.from(t * scalars, scalars), a.norm.scale.from(t * scalars, scalars),
                                 a.norm.mean.from(t * scalars, scalars)},
                                at, here, b, dc);
      } else {
        softmax_out<Tr, true>(counts, in.leaky, b, dc);
      }
    }
    const int64_t again = vectors + a.zero;
    add_vectors<Tr>(b, lane_vectors<Tr>(a.ds, again, at), dvotes);
    if (with_db) add_vectors<Tr>(dc, lane_vectors<Tr>(a.V, again, at), dvotes);
    if constexpr (!Tr::plain) {
#pragma unroll
      for (int slot = 0; slot < Tr::slots; ++slot) {
        dlogits[slot][0] = (t == a.first ? 0.0f : dlogits[slot][0]) + dc[slot][0];
        dlogits[slot][1] = (t == a.first ? 0.0f : dlogits[slot][1]) + dc[slot][1];
      }
    }
  }
}

// The two TF32 parts of four numbers, or one, in fewer instructions than two_parts() and to_tf32() take: bits that TF32
// does not have are dropped, here or by the tensor core. What is dropped has the sign of x; on average the factors make
// up for it.
template <class Tr>
CAPSFAST_DEVICE void take_parts(const float (&x)[4], float (&high)[4], float (&low)[4]) {
  constexpr float kOfLow = 1.0f + 0x1p-23f;    // of the last two of 24 bits, three quarters of a unit
  constexpr float kOfOne = 1.0f + 0x1.7p-12f;  // half a unit of 11 bits, for mantissas as they occur
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if constexpr (Tr::exact) {
      high[n] = float_of_bits(bits_of_float(x[n]) & 0xFFFFE000u);
      low[n] = x[n] * kOfLow - high[n];
    } else {
      high[n] = x[n] * kOfOne;
    }
  }
}

// c += a b of numbers in two parts.
template <class Tr>
CAPSFAST_DEVICE void multiply(float (&c)[4], const float (&a_high)[4], const float (&a_low)[4],
                              const float (&b_high)[2], const float (&b_low)[2]) {
  if constexpr (Tr::exact) {
    gpu::mma_tf32(c, a_low, b_high);
    gpu::mma_tf32(c, a_high, b_low);
  }
  gpu::mma_tf32(c, a_high, b_high);
}

// Elements n and n + 1 of a contiguous tensor, of which the second is missing if `one`. together: n is always even.
template <class Tr>
CAPSFAST_DEVICE void write_two(const Operand& to, int64_t n, float x, float y, bool one, bool together) {
  if (one || !together) {
    to.write<float>(n, x);
    if (!one) to.write<float>(n + 1, y);
  } else if ((Tr::plain && Tr::exact) || to.storage == Storage::f32) {
    to.data.as<Run<float, 2>>()[n / 2] = {x, y};
  } else if (to.storage == Storage::bf16) {
    to.data.as<Run<uint16_t, 2>>()[n / 2] = {float_to_bf16(x), float_to_bf16(y)};
  } else {
    to.data.as<Run<uint16_t, 2>>()[n / 2] = {float_to_half(x), float_to_half(y)};
  }
}

// du [16, K] = dvotes W, a sum over columns. A product may take these in any order: a lane's columns 2 quad and 2 quad
// + 1 of the accumulator become its two rows of the operand, so no lane passes dvotes on. Chains of products that
// depend on each other are short.
template <class Tr>
CAPSFAST_DEVICE void write_du(const GradientArgs& a, const Shared<float>& weight, int capsule, const ThreadCoord& at,
                              const ScoreCoord& of, const Accumulator (&dvotes)[Tr::tiles]) {
  constexpr int kChains = 4;
  const int base = capsule * Tr::weight + at.group;
  const int full = base + at.quad * Tr::weight_pitch;
  const int pair = base + (4 * Tr::groups + at.quad / 2) * Tr::weight_pitch + 2 * (at.quad % 2) * Tr::K;
  float du[kChains][Tr::steps][4] = {};
#pragma unroll
  for (int tile = 0; tile < Tr::tiles; ++tile) {
    const int G = tile / 8, t = tile % 8;
    const float g[4] = {dvotes[tile][0], dvotes[tile][2], dvotes[tile][1], dvotes[tile][3]};
    float high[4], low[4];
    take_parts<Tr>(g, high, low);
#pragma unroll
    for (int step = 0; step < Tr::steps; ++step) {
      const int from = G < Tr::groups ? full + 4 * G * Tr::weight_pitch + (2 * t * Tr::K + kStep * step)
                                      : pair + (4 * t * Tr::K + kStep * step);
      const float w_high[2] = {weight[from], weight[from + Tr::K]};
      float w_low[2] = {};
      if constexpr (Tr::exact) {
        w_low[0] = weight[from + Tr::weight_part];
        w_low[1] = weight[from + Tr::weight_part + Tr::K];
      }
      multiply<Tr>(du[tile % kChains][step], high, low, w_high, w_low);
    }
  }
  const int K = static_cast<int>(a.in.K);
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int64_t sample = of.sample(at, row);
    if (sample >= a.in.B) continue;
    // A masked input capsule has no gradient, whatever the weight holds.
    const bool kept = Tr::plain || a.in.mask.at(sample, of.i);
    const int64_t row_at = (sample * a.in.I + of.i) * K;
#pragma unroll
    for (int step = 0; step < Tr::steps; ++step) {
      float x[2];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        x[n] = kept ? du[0][step][2 * row + n] + du[1][step][2 * row + n] +
                          (du[2][step][2 * row + n] + du[3][step][2 * row + n])
                    : 0.0f;
      const int k = kStep * step + 2 * at.quad;
      if (k < K) write_two<Tr>(a.du, row_at + k, x[0], x[1], k + 1 == K, K % 2 == 0);
    }
  }
}

// dweight [columns, K] = dvotes^T u, a sum over the warp's samples, to its part of `sums`. Lanes need other elements of
// dvotes for it than they have, so these are turned around in shared memory of the warp.
template <class Tr>
CAPSFAST_DEVICE void make_dweight(const Shared<float>& poses, int poses_at, const Shared<float>& turned,
                                  const Shared<float>& sums, const ThreadCoord& at,
                                  const Accumulator (&dvotes)[Tr::tiles]) {
  using Memory = GradientMemory<Tr>;
  // A product may take its samples in any order: this lane's are 4 quad and 4 quad + 1 in the first, the next two in
  // the second, so that it reads four neighbours.
  float u_high[2][Tr::steps][2], u_low[2][Tr::steps][2];
#pragma unroll
  for (int product = 0; product < 2; ++product) {
#pragma unroll
    for (int step = 0; step < Tr::steps; ++step) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int sample = 4 * at.quad + 2 * product + n, lane = sample % 8 * 4 + at.group / 2;
        const float x = poses[poses_at + step * 128 + lane * 4 + at.group % 2 * 2 + sample / 8];
        u_high[product][step][n] = x;
        if constexpr (Tr::exact) two_parts(x, u_high[product][step][n], u_low[product][step][n]);
      }
    }
  }
  const int base = at.warp * Memory::turn;
  const int full = at.warp * Tr::weight_part + at.group / 2 * Tr::weight_pitch + at.group % 2 * Tr::K + 2 * at.quad;
  const int pair = at.warp * Tr::weight_part + (4 * Tr::groups + at.group / 4) * Tr::weight_pitch +
                   at.group % 4 * Tr::K + 2 * at.quad;
#pragma unroll
  for (int m = 0; m < Tr::tiles / 2; ++m) {
    gpu::warp_barrier();  // all lanes have read what is overwritten now
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const Accumulator& x = dvotes[2 * m + tile];
      const int to = base + (tile * 8 + 2 * at.quad) * Memory::pitch + at.group;
      turned[to] = x[0];
      turned[to + Memory::pitch] = x[1];
      turned[to + 8] = x[2];
      turned[to + Memory::pitch + 8] = x[3];
    }
    gpu::warp_barrier();
    Four of[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
      of[tile] = turned.template vector<Four>(base + (tile * 8 + at.group) * Memory::pitch + 4 * at.quad);
    // Rows n = group of tiles 2 m and 2 m + 1, components 2 quad and 2 quad + 1.
    float dweight[Tr::steps][4] = {};
#pragma unroll
    for (int product = 0; product < 2; ++product) {
      const float g[4] = {of[0].value[2 * product], of[1].value[2 * product], of[0].value[2 * product + 1],
                          of[1].value[2 * product + 1]};
      float high[4], low[4];
      take_parts<Tr>(g, high, low);
#pragma unroll
      for (int step = 0; step < Tr::steps; ++step)
        multiply<Tr>(dweight[step], high, low, u_high[product][step], u_low[product][step]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int tile = 2 * m + half, G = tile / 8, t = tile % 8;
#pragma unroll
      for (int step = 0; step < Tr::steps; ++step) {
        const int to = G < Tr::groups ? full + 4 * G * Tr::weight_pitch + (2 * t * Tr::K + kStep * step)
                                      : pair + (4 * t * Tr::K + kStep * step);
        sums.write(to, gpu::Pair{dweight[step][2 * half], dweight[step][2 * half + 1]});
      }
    }
  }
}

// Adds up dweight of the warps that share an input capsule and have one of the `tiles`, for `count` input capsules from
// i on, and adds it to memory. first: nothing is there yet.
template <class Tr>
CAPSFAST_DEVICE void write_dweight(const GradientArgs& a, const Shared<float>& sums, int tiles, int64_t part, int64_t i,
                                   bool first, int count) {
  constexpr int kFours = Tr::K / 4;
  const int J = static_cast<int>(a.in.J), D = static_cast<int>(a.in.D), K = static_cast<int>(a.in.K);
  const int64_t size = static_cast<int64_t>(J) * D * K, row = a.shared_weight ? part : part * a.in.I + i;
  const int capsules = a.shared_weight ? 1 : count, more = a.shared_weight ? count : 1;
  // Unrolled, so that the loads of a thread are under way together.
#pragma unroll 4
  for (int n = gpu::thread(); n < capsules * Tr::outputs * kComponents * kFours; n += gpu::threads()) {
    const int k = n % kFours * 4, d = n / kFours % kComponents, j = n / kFours / kComponents % Tr::outputs;
    const int capsule = n / (kFours * kComponents * Tr::outputs);
    if (j >= J || d >= D || k >= K) continue;
    const int64_t to = (row + capsule) * size + (j * D + d) * K + k;
    const bool four = K % 4 == 0;
    Four sum = {};
    if (!first) {
      if (four) {
        sum = a.dweight.template vector<Four>(to);
      } else {
        for (int m = 0; m < 4 && k + m < K; ++m) sum.value[m] = a.dweight[to + m];
      }
    }
    for (int c = capsule; c < capsule + more; ++c) {
      for (int tile = 0; tile < tiles; ++tile) {
        const int warp = (c << a.shape.tiles_log) + tile;
        const Four x = sums.template vector<Four>(warp * Tr::weight_part + j * Tr::weight_pitch + d * Tr::K + k);
#pragma unroll
        for (int m = 0; m < 4; ++m) sum.value[m] += x.value[m];
      }
    }
    if (four) {
      a.dweight.template as<Four>()[to / 4] = sum;
    } else {
      for (int m = 0; m < 4 && k + m < K; ++m) a.dweight[to + m] = sum.value[m];
    }
  }
}

// dlogits [B, I, J] of a warp's samples, or their sum over these samples, in shared memory.
template <class Tr>
CAPSFAST_DEVICE void put_dlogits(const GradientArgs& a, const GradientMemory<Tr>& memory, const ThreadCoord& at,
                                 const ScoreCoord& of, const Scores<Tr>& dlogits) {
  const int J = static_cast<int>(a.in.J);
  const Shared<float> sums = gpu::shared<float>(4 * memory.dlogits, a.dlogits ? a.shape.warps() * Tr::outputs : 0);
#pragma unroll
  for (int slot = 0; slot < Tr::slots; ++slot) {
    const int j = output_of<Tr>(at, slot);
    const bool stands = stands_for<Tr>(at, slot, J);
    const int64_t* stride = a.dlogits_sample.stride;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const int64_t sample = of.sample(at, row);
      if (a.dlogits_sample.data && stands && sample < a.in.B)
        a.dlogits_sample.template write<float>(
            sample * stride[0] + of.i * stride[1] + j * stride[2], dlogits[slot][row]);
    }
    if (!a.dlogits) continue;
    float sum = 0.0f;
#pragma unroll
    for (int row = 0; row < 2; ++row) sum += of.sample(at, row) < a.in.B ? dlogits[slot][row] : 0.0f;
    for (int mask = 4; mask < 32; mask *= 2) sum += gpu::shuffle_xor(sum, mask);
    if (stands && at.group == 0) sums[at.warp * Tr::outputs + j] = sum;
  }
}

template <class Tr>
CAPSFAST_DEVICE void write_dlogits(const GradientArgs& a, const GradientMemory<Tr>& memory, int tiles, int64_t part,
                                   int64_t i, bool first, int count) {
  const int J = static_cast<int>(a.in.J);
  const Shared<float> sums = gpu::shared<float>(4 * memory.dlogits, a.shape.warps() * Tr::outputs);
  for (int n = gpu::thread(); n < count * J; n += gpu::threads()) {
    const int capsule = n / J, j = n - capsule * J;
    double sum = 0.0;
    for (int tile = 0; tile < tiles; ++tile)
      sum += static_cast<double>(sums[((capsule << a.shape.tiles_log) + tile) * Tr::outputs + j]);
    double& to = a.dlogits[(part * a.in.I + i + capsule) * J + j];
    to = first ? sum : to + sum;
  }
}

// A block walks over the groups of samples of one part of the batch and the input capsules of one split. Parts are the
// fast axis of the grid: blocks that read the same weights are neighbours.
template <class Tr>
CAPSFAST_KERNEL(32 * kMostWarps, 1)
gradient_kernel(GradientArgs a) {
  const Shape& shape = a.shape;
  const ThreadCoord at = thread_coord();
  const GradientMemory<Tr> memory(a.in, shape, static_cast<bool>(a.dlogits));
  const Chunk<Tr> chunk(a.in, a.in_pieces, shape);
  const Shared<float> weight = chunk.weight(), poses = chunk.poses(),
                      turned = gpu::shared<float>(4 * memory.turned, memory.sums - memory.turned),
                      sums = gpu::shared<float>(4 * memory.sums, memory.dlogits - memory.sums);
  const int tile = at.warp & (shape.tiles() - 1), stream = at.warp >> shape.tiles_log, group = shape.samples();
  const int part = static_cast<int>(gpu::block_x()), parts = static_cast<int>(gpu::blocks_x());
  const int split = static_cast<int>(gpu::block_y()), splits = static_cast<int>(gpu::blocks_y());
  const int I = static_cast<int>(a.in.I), B = static_cast<int>(a.in.B);
  const int begin = part_of(I, split, splits), end = part_of(I, split + 1, splits);
  const unsigned counts = standing<Tr>(at, static_cast<int>(a.in.J));
  for (int b0 = part * group; b0 < B; b0 += parts * group) {
    const bool first = b0 == part * group;
    const int here = (B - b0 + kSamples - 1) / kSamples, tiles = here < shape.tiles() ? here : shape.tiles();
    chunk.walk(b0, begin, end, [&](int i, int count) {
      if (stream < count && tile < tiles) {
        const ScoreCoord of{b0 + kSamples * tile, i + stream};
        const int poses_at = ((stream << shape.tiles_log) + tile) * Tr::poses;
        Accumulator dvotes[Tr::tiles];
        Scores<Tr> dlogits;
        {
          Accumulator votes[Tr::tiles];
          make_votes<Tr, false>(weight, stream, poses, poses_at, at, votes);
          if constexpr (!Tr::plain) drop_masked<Tr>(a.in, of.b0, of.i, at, votes);
          make_dvotes<Tr>(a, at, of, counts, votes, dvotes, dlogits);
        }
        if constexpr (!Tr::plain) {
          if (a.dlogits || a.dlogits_sample.data) put_dlogits<Tr>(a, memory, at, of, dlogits);
          gpu::warp_barrier();  // products follow, which take the whole warp
        }
        if (a.du.data) write_du<Tr>(a, weight, stream, at, of, dvotes);
        if (a.dweight) make_dweight<Tr>(poses, poses_at, turned, sums, at, dvotes);
      }
      if (!a.dweight && !a.dlogits) return;
      gpu::barrier();
      const int64_t row = a.shared_weight ? static_cast<int64_t>(part) * splits + split : part;
      // Barriers of the next chunk keep its sums from coming here before these are read.
      if (a.dweight) write_dweight<Tr>(a, sums, tiles, row, i, first && !(a.shared_weight && i > begin), count);
      if constexpr (!Tr::plain) {
        if (a.dlogits) write_dlogits<Tr>(a, memory, tiles, part, i, first, count);
      }
    });
  }
}

}  // namespace capsfast::cuda::rows
