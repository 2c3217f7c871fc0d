// The arguments of kernels: tensors with strides, sizes, options; the order of vectors that kernels write for each
// other, and how blocks share the work of a pass.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "../../cuda/device.h"
#include "../../math/half.h"
#include "../problem.h"

namespace capsfast::cuda {

using gpu::Global;

// 16-bit elements as they are stored. Their sums are formed in float.
struct BFloat16 {
  uint16_t bits;
  CAPSFAST_DEVICE operator float() const { return bf16_to_float(bits); }
  static CAPSFAST_DEVICE BFloat16 nearest(float x) { return {float_to_bf16(x)}; }
};
struct Float16 {
  uint16_t bits;
  CAPSFAST_DEVICE operator float() const { return half_to_float(bits); }
  static CAPSFAST_DEVICE Float16 nearest(float x) { return {float_to_half(x)}; }
};
template <class E>
using Wide = std::conditional_t<std::is_same_v<E, double>, double, float>;

template <class E, class T>
CAPSFAST_DEVICE E narrowed(T x) {
  if constexpr (std::is_arithmetic_v<E>) {
    return static_cast<E>(x);
  } else {
    return E::nearest(static_cast<float>(x));
  }
}

template <class T>
struct Extreme {
  static constexpr T lowest = std::numeric_limits<T>::lowest(), infinity = std::numeric_limits<T>::infinity();
};

// kCount neighbouring elements that are loaded or stored at once.
template <class E, int kCount>
struct alignas(kCount * sizeof(E)) Run {
  E value[kCount];
};

CAPSFAST_HOST_DEVICE inline int element_bytes(Storage storage) {
  return storage == Storage::f64 ? 8 : storage == Storage::f32 ? 4 : 2;
}

// A tensor whose element type is known only at run time; strides in elements. `data` is null if the tensor is absent.
struct Operand {
  Global<unsigned char> data;
  Storage storage = Storage::f32;
  int64_t stride[4] = {0, 0, 0, 0};

  // The index of an element; if not all axes are given, the index of the first element.
  template <class... Axes>
  CAPSFAST_DEVICE int64_t at(Axes... place) const {
    int64_t n = 0;
    const int64_t* along = stride;
    ((n += place * *along++), ...);
    return n;
  }
  template <class T>
  CAPSFAST_DEVICE T read(int64_t n) const {
    T value = T(0);
    with_type([&](auto elements) { value = static_cast<T>(elements[n]); });
    return value;
  }
  template <class T>
  CAPSFAST_DEVICE void write(int64_t n, T value) const {
    with_type([&](auto elements) { elements[n] = narrowed<std::decay_t<decltype(elements[n])>>(value); });
  }
  // Adds an element to *sum, or writes an element. Does nothing if the tensor is absent.
  template <class T, class... Axes>
  CAPSFAST_DEVICE void add_to(T* sum, Axes... place) const {
    if (data) *sum += read<T>(at(place...));
  }
  template <class T, class... Axes>
  CAPSFAST_DEVICE void put(T value, Axes... place) const {
    if (data) write<T>(at(place...), value);
  }

 private:
  template <class F>
  CAPSFAST_DEVICE void with_type(const F& f) const {
    switch (storage) {
      case Storage::f32:
        return f(data.as<float>());
      case Storage::f64:
        return f(data.as<double>());
      case Storage::bf16:
        return f(data.as<BFloat16>());
      case Storage::f16:
        return f(data.as<Float16>());
    }
  }
};

// A bool matrix. If `data` is null everything is valid.
struct Mask {
  Global<const uint8_t> data;
  int64_t stride[2] = {0, 0};

  CAPSFAST_DEVICE bool at(int64_t row, int64_t column) const {
    return !data || data[row * stride[0] + column * stride[1]] != 0;
  }
};

// The inputs of a call. `matrix` is the weight [I, J, D, K], whose stride over I is 0 if it is shared, or the given
// votes [B, I, J, D].
struct Inputs {
  int64_t B, I, J, D, K;
  bool softmax_in, leaky;
  Operand u, matrix;    // u [B, I, K], absent where votes are given
  Operand logits;       // [B, I, J]
  Operand prior;        // [B, J], added to the logits; only in a pass op
  Mask mask, out_mask;  // [B, I], [B, J]
};

// The n-th column (j, d) of votes, 0 <= n < 8, of a tile: see rows/layout.h.
struct Component {
  int j, d;
};

CAPSFAST_HOST_DEVICE constexpr Component component_of(int tiles, int tile, int n) {
  const int quad = n / 2, e = n % 2 ^ quad / 2, G = tile / 8, t = tile % 8;
  if (G < tiles / 8) return {4 * G + quad, 2 * (t ^ quad % 2) + e};
  return {4 * G + quad / 2, 4 * t + 2 * (quad % 2) + e};
}

// The tile and the n of a column: the inverse of component_of.
struct TileColumn {
  int tile, n;
};

CAPSFAST_HOST_DEVICE constexpr TileColumn tile_column_of(int tiles, int j, int d) {
  const int G = j / 4;
  const bool whole = G < tiles / 8;
  const int quad = whole ? j % 4 : j % 4 * 2 + d / 2 % 2;
  return {8 * G + (whole ? d / 2 ^ quad % 2 : d / 4), 2 * quad + (d % 2 ^ quad / 2)};
}

// [B, J, D] or, if `tiles` is not 0, the order in which the rows family reads vectors, where padding is 0: [B /
// 16][tiles / 2][even, odd columns][32 lanes][2 samples][2 tiles].
struct VectorOrder {
  int64_t J, D;
  int tiles;

  CAPSFAST_HOST_DEVICE int64_t size(int64_t B) const { return tiles == 0 ? B * J * D : (B + 15) / 16 * tiles * 128; }
  CAPSFAST_HOST_DEVICE bool padded(int64_t B) const { return tiles != 0 && size(B) != B * J * D; }
  CAPSFAST_HOST_DEVICE int64_t at(int64_t b, int64_t j, int64_t d) const {
    if (tiles == 0) return (b * J + j) * D + d;
    const TileColumn column = tile_column_of(tiles, static_cast<int>(j), static_cast<int>(d));
    const int64_t lane = b % 8 * 4 + column.n / 2;
    const int block = column.tile / 2 * 2 + column.n % 2;
    return ((b / 16 * tiles + block) * 32 + lane) * 4 + b % 16 / 8 * 2 + column.tile % 2;
  }
};

// Samples are cut into groups. All pairs (group, input capsule), one group after the other, form a row. The row is cut
// into `units` equal parts, one for each cluster of blocks that the device runs at the same time. So every batch fills
// the device, and all blocks of a pass run at once. A segment is what a unit has of one group; a unit that crosses a
// border between groups has two segments or more. Each segment has one partial sum.
struct Work {
  int64_t I, group, groups, units;  // group: samples of a group

  CAPSFAST_HOST_DEVICE int64_t begin(int64_t unit) const { return groups * I * unit / units; }
  CAPSFAST_HOST_DEVICE int64_t unit_of(int64_t n) const { return ((n + 1) * units - 1) / (groups * I); }
  // Segments are numbered along the row: a border between units or groups increases the number by 1.
  CAPSFAST_HOST_DEVICE int64_t segment(int64_t unit, int64_t g) const { return unit + g; }
  CAPSFAST_HOST_DEVICE int64_t segments() const { return units > 0 ? units + groups - 1 : 0; }

  // The segments [first_segment, end_segment) of the group of sample b, and the row of output capsule j of that sample
  // in arrays [segments, group, J].
  CAPSFAST_HOST_DEVICE int64_t first_segment(int64_t b) const {
    const int64_t g = b / group;
    return units > 0 ? segment(unit_of(g * I), g) : 0;
  }
  CAPSFAST_HOST_DEVICE int64_t end_segment(int64_t b) const {
    const int64_t g = b / group;
    return units > 0 ? segment(unit_of((g + 1) * I - 1), g) + 1 : 0;
  }
  CAPSFAST_HOST_DEVICE int64_t row(int64_t segment, int64_t b, int64_t j, int64_t J) const {
    return (segment * group + b % group) * J + j;
  }
};

// The arrays that score votes in iteration t. V [B, J, D] is the sum of the outputs before t, absent in the first
// iteration. ds [B, J, D] is the gradient of s_t, absent in the forward. dcoupling [B, I, J] is added to dc; it is
// absent except in the last iteration of a backward. A pass op is one iteration: V is its query and ds the gradient of
// its first moment. dmass [B, J], the gradient of its mass, is added to dc. dlse is the gradient of the log-sum-exp:
// [B, I], or [B, J] for a softmax over the input capsules.
template <class T>
struct Scoring {
  Global<const T> V, ds;
  Operand dcoupling, dmass, dlse;
};

// The normaliser of c = exp(b - max) scale, and mean = sum c dc. The softmax over the output capsules has one for each
// row (an input capsule of a sample): arrays [B, I], absent if a block has all output capsules. The softmax over the
// input capsules has one for each column (an output capsule of a sample): arrays [B, J].
template <class T>
struct Normaliser {
  Global<const T> max, scale, mean;

  // The normaliser of iteration t, if this object holds all iterations of `count` numbers each.
  CAPSFAST_HOST_DEVICE Normaliser of(int64_t t, int64_t count) const {
    return {max.from(t * count, count), scale.from(t * count, count), mean.from(t * count, count)};
  }
};

// Partial sums of an accumulating pass, one for each segment of `work`. If max and total are there, each segment has
// weighted its input capsules with exp(b - max), where the largest logit b of that segment exceeds max by 8 at most,
// and total is the sum of these weights.
template <class T>
struct Parts {
  Work work;
  Global<double> sum;      // [segments, group, J, D or, with mass, D + 1], of the general kernels
  Global<float> sum_rows;  // the same for the rows family, whose sums are short enough for float
  Global<T> max;           // [segments, group, J]
  Global<double> total;    // [segments, group, J]

  CAPSFAST_DEVICE double part(int64_t n) const {
    return sum ? static_cast<double>(sum[n]) : static_cast<double>(sum_rows[n]);
  }
};

// One pass that accumulates sum_i c votes or, in the backward, sum_i db votes.
template <class T>
struct AccumulateArgs {
  Inputs in;
  Scoring<T> scoring;
  Normaliser<T> norm;
  bool unweighted;   // every coefficient counts as 1: the first iteration without logits
  bool mass;         // a sum has one element more than D: the sum of the coefficients
  Parts<T> to;       // written. sum is absent if only the coupling is wanted, max if the normaliser is known
  Operand coupling;  // [B, I, J], written
  Operand lse;       // [B, I], written: the log-sum-exp over the output capsules
};

// The gradient pass, for all iterations at once. Partial sums have an axis of parts of the samples.
template <class T>
struct GradientArgs {
  Inputs in;
  int64_t start, iterations;  // iterations [start, iterations) have gradients
  bool gradient_last, shared_weight;
  Global<const T> V, ds;           // [r, B, J, D]; V[t] is what iteration t scored with
  Normaliser<T> norm;              // columns [r, B, J], or rows [r, B, I], absent if a tile has all output capsules
  Operand dcoupling, dmass, dlse;  // as in Scoring
  Operand du;                      // [B, I, K], contiguous
  Operand dvotes;                  // [B, I, J, D]
  Global<double> dweight;          // [parts, I, J, D, K] or, for a shared weight, [parts, blocks, J, D, K]
  Global<float> dweight_rows;      // the same for the rows family
  Operand dlogits_sample;          // [B, I, J], if the logits are [B, I, J]
  Global<double> dlogits;          // [parts, I, J], if the logits are [I, J]
  int64_t scored;                  // the first iteration that scores with a V; only for the general kernel
};

// Threads of a block, in the general kernels and in the steps between the passes.
constexpr int kThreads = 128;

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The logarithm of a power of two to base 2.
inline int log_of(int64_t power) {
  int log = 0;
  for (; power > 1; power /= 2) ++log;
  return log;
}

}  // namespace capsfast::cuda
