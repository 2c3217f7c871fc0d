// Brings weights and poses of a few input capsules, a chunk, to a block's shared memory. Asynchronous copies of the raw
// bytes run while the block works on the chunk before. Then the bytes are converted to the order and type that the
// products read; weights are split into TF32 parts once for all warps.
#pragma once

#include "../params.h"
#include "layout.h"

namespace capsfast::cuda::rows {

// How a block cuts its work, chosen by launch.h.
struct Shape {
  int tiles_log;  // base 2, of the tiles of 16 samples that a block has
  int streams;    // warps that share a tile; each has other input capsules
  int chunk;      // input capsules that are in shared memory at a time, a multiple of `streams`
  bool weight_in_pieces, poses_in_pieces;  // may be copied in pieces of 16 bytes

  CAPSFAST_HOST_DEVICE int tiles() const { return 1 << tiles_log; }
  CAPSFAST_HOST_DEVICE int samples() const { return kSamples << tiles_log; }
  CAPSFAST_HOST_DEVICE int warps() const { return streams << tiles_log; }
  CAPSFAST_HOST_DEVICE int threads() const { return 32 * warps(); }
};

// Where a chunk's arrays begin in the block's shared memory, in bytes.
template <class Tr>
struct ChunkMemory {
  int weight = 0, poses;         // Tr::weight and tiles x Tr::poses floats for each input capsule
  int weight_bytes, pose_bytes;  // raw bytes of an input capsule, and of a sample; a weight has whole pieces
  int raw_weight, raw_poses;     // [chunk][weight_bytes], [chunk][samples][pose_bytes]
  int end;

  CAPSFAST_HOST_DEVICE ChunkMemory(const Inputs& in, const Shape& shape)
      : poses(4 * shape.chunk * Tr::weight),
        weight_bytes(static_cast<int>(in.J * in.D * in.K * element_bytes(in.matrix.storage) + 15) / 16 * 16),
        pose_bytes(static_cast<int>(in.K) * element_bytes(in.u.storage)),
        raw_weight(poses + 4 * shape.chunk * shape.tiles() * Tr::poses),
        raw_poses(raw_weight + shape.chunk * weight_bytes),
        end(raw_poses + (shape.chunk * shape.samples() * pose_bytes + 15) / 16 * 16) {}
};

// Splits x into the nearest TF32 number, high, and the rest, low. The tensor core drops the bits of low that TF32 does
// not have, which leaves about 22 bits of x. Rounding in integers may turn a NaN into a number, but then low is NaN, so
// no NaN is lost. to_tf32() looks for NaN first and takes twice as long.
CAPSFAST_DEVICE void two_parts(float x, float& high, float& low) {
  high = float_of_bits((bits_of_float(x) + 0x1000u) & 0xFFFFE000u);
  low = x - high;
}

// The n-th four elements of weights, or gradients of weights, [capsules][Tr::pairs][Tr::steps][32 lanes]: components k
// and k + 1 of a column in each of two tiles. place: their index in the gradient of the input capsule.
template <class Tr>
struct PlaneItem {
  int capsule, pair, k, n, place;

  CAPSFAST_DEVICE explicit PlaneItem(int item)
      : capsule(item / (Tr::dweight / 4)),
        pair(item / 32 / Tr::steps % Tr::pairs),
        k(item / 32 % Tr::steps * kStep + 2 * (item % 4)),
        n(item / 4 % 8),
        place((pair * Tr::steps + k / kStep) * kPlane + in_plane(n, item % 4)) {}
  CAPSFAST_DEVICE Component column(int tile) const { return component_of(Tr::tiles, 2 * pair + tile, n); }
};

template <class Tr>
class Chunk {
 public:
  CAPSFAST_DEVICE Chunk(const Inputs& inputs, const Shape& cut) : in(inputs), shape(cut), at(inputs, cut) {}

  CAPSFAST_DEVICE Shared<float> weight() const { return gpu::shared<float>(at.weight, shape.chunk * Tr::weight); }
  CAPSFAST_DEVICE Shared<float> poses() const {
    return gpu::shared<float>(at.poses, shape.chunk * shape.tiles() * Tr::poses);
  }

  // Where the poses of an input capsule for a tile of samples begin, in floats.
  CAPSFAST_DEVICE int poses_at(int capsule, int tile) const {
    return ((capsule << shape.tiles_log) + tile) * Tr::poses;
  }

  // Calls f(i, count) for each chunk of the input capsules [begin, end) when it is in shared memory, for the samples
  // from b0 on. All threads of the block must call walk(). It begins with a barrier, and has two barriers before each
  // chunk.
  template <class F>
  CAPSFAST_DEVICE void walk(int b0, int begin, int end, const F& f) const {
    const auto count_from = [&](int i) { return end - i < shape.chunk ? end - i : shape.chunk; };
    // One turn more than there are chunks: the first only starts copies.
    for (int i = begin - shape.chunk; i < end; i += shape.chunk) {
      const int count = i < begin ? 0 : count_from(i);
      gpu::copies_wait();
      gpu::barrier();
      convert(b0, i, count);
      gpu::barrier();
      if (i + shape.chunk < end) start(b0, i + shape.chunk, count_from(i + shape.chunk));
      if (count > 0) f(i, count);
    }
  }

 private:
  // Starts copying `count` input capsules from i on, and their poses of the samples from b0 on.
  CAPSFAST_DEVICE void start(int64_t b0, int64_t i, int count) const {
    const int weights = static_cast<int>(in.J * in.D * in.K), left = static_cast<int>(in.B - b0);
    const int samples = left < shape.samples() ? left : shape.samples();
    const int64_t *weight = in.matrix.stride, *u = in.u.stride;
    for (int capsule = 0; capsule < count; ++capsule)
      start_rows(in.matrix, (i + capsule) * weight[0], 1, 0, weights, 1, shape.weight_in_pieces,
                 at.raw_weight + capsule * at.weight_bytes);
    for (int capsule = 0; capsule < count; ++capsule)
      start_rows(in.u, b0 * u[0] + (i + capsule) * u[1], samples, u[0], static_cast<int>(in.K), u[2],
                 shape.poses_in_pieces, at.raw_poses + capsule * shape.samples() * at.pose_bytes);
  }

  // Starts copying rows of `length` elements to byte `to` of shared memory: element n of row r is first + r stride + n
  // step of the tensor. Elements that do not fit pieces of 16 bytes are copied synchronously.
  static CAPSFAST_DEVICE void start_rows(const Operand& from, int64_t first, int rows, int64_t stride, int length,
                                         int64_t step, bool in_pieces, int to) {
    const int size = element_bytes(from.storage);
    if (in_pieces) {
      const int bytes = length * size;
#pragma unroll 1
      for (int n = 16 * gpu::thread(); n < rows * bytes; n += 16 * gpu::threads()) {
        const int row = rows == 1 ? 0 : n / bytes;
        gpu::copy_ahead(gpu::shared<unsigned char>(to, rows * bytes), n, Global<const unsigned char>(from.data),
                        (first + row * stride) * size + n - row * bytes);
      }
      return;
    }
#pragma unroll 1
    for (int n = gpu::thread(); n < rows * length; n += gpu::threads()) {
      const int row = rows == 1 ? 0 : n / length;
      const int64_t element = first + row * stride + (n - row * length) * step;
      if (size == 4) {
        gpu::shared<float>(to + 4 * n, 1)[0] = from.data.as<const float>()[element];
      } else {
        gpu::shared<uint16_t>(to + 2 * n, 1)[0] = from.data.as<const uint16_t>()[element];
      }
    }
  }

  // Converts the copies of start() for the products. Every thread must have waited for its copies.
  CAPSFAST_DEVICE void convert(int b0, int i, int count) const {
    if ((Tr::exact && Tr::plain) || in.u.storage == Storage::f32) {
      convert_weight<float>(count);
      convert_poses<float>(b0, i, count);
    } else if (in.u.storage == Storage::bf16) {
      convert_weight<BFloat16>(count);
      convert_poses<BFloat16>(b0, i, count);
    } else {
      convert_weight<Float16>(count);
      convert_poses<Float16>(b0, i, count);
    }
  }

  // Elements n to n + kCount - 1 of an array of type E from byte `from` of shared memory on; n is a multiple of kCount.
  template <class E, int kCount>
  static CAPSFAST_DEVICE Run<float, kCount> raw(int from, int n) {
    const int size = static_cast<int>(sizeof(E));
    const auto x = gpu::shared<E>(from + size * n, kCount).template vector<Run<E, kCount>>(0);
    Run<float, kCount> wide;
    unrolled<kCount>([&](int m) { wide.value[m] = widened(x.value[m]); });
    return wide;
  }

  template <class E>
  CAPSFAST_DEVICE void convert_weight(int count) const {
    const int J = static_cast<int>(in.J), D = static_cast<int>(in.D), K = static_cast<int>(in.K);
    const Shared<float> to = weight();
#pragma unroll 1
    for (int n = gpu::thread(); n < count * Tr::dweight / 4; n += gpu::threads()) {
      const PlaneItem<Tr> item(n);
      const int from = at.raw_weight + item.capsule * at.weight_bytes;
      Four w = {};
      unrolled<2>([&](int tile) {
        const Component column = item.column(tile);
        if (column.j >= J || column.d >= D || item.k >= K) return;
        const int first = (column.j * D + column.d) * K + item.k;
        float* const two = w.value + 2 * tile;
        if (K % 2 == 0) {
          const Run<float, 2> both = raw<E, 2>(from, first);
          two[0] = both.value[0], two[1] = both.value[1];
        } else {
          two[0] = raw<E, 1>(from, first).value[0];
          if (item.k + 1 < K) two[1] = raw<E, 1>(from, first + 1).value[0];
        }
      });
      Four high, low;
      unrolled<4>([&](int m) {
        if constexpr (Tr::exact) {
          two_parts(w.value[m], high.value[m], low.value[m]);
        } else {
          high.value[m] = gpu::to_tf32(w.value[m]);
        }
      });
      const int n_to = n / 32 * Tr::parts * kPlane + in_plane(item.n, n % 4);
      to.write(n_to, high);
      if constexpr (Tr::exact) to.write(n_to + kPlane, low);
    }
  }

  // Poses of absent samples and masked poses become 0, even if they hold NaN.
  template <class E>
  CAPSFAST_DEVICE void convert_poses(int b0, int i, int count) const {
    const int K = static_cast<int>(in.K);
    const Shared<float> to = poses();
    const int all = (count << shape.tiles_log) * Tr::poses / 4;
#pragma unroll 1
    for (int n = gpu::thread(); n < all; n += gpu::threads()) {
      const int lane = n % 32, k = n / 32 % Tr::steps * kStep + 2 * (lane % 4), unit = n / 32 / Tr::steps;
      const int capsule = unit >> shape.tiles_log, tile = unit - (capsule << shape.tiles_log);
      Four u;
      unrolled<4>([&](int m) {
        const int sample = tile * kSamples + lane / 4 + m % 2 * 8;
        const bool valid = b0 + sample < in.B && k + m / 2 < K && in.mask.at(b0 + sample, i + capsule);
        const int from = at.raw_poses + (capsule * shape.samples() + sample) * at.pose_bytes;
        const float x = valid ? raw<E, 1>(from, k + m / 2).value[0] : 0.0f;
        u.value[m] = Tr::exact ? x : gpu::to_tf32(x);
      });
      to.write(4 * n, u);
    }
  }

  const Inputs& in;
  const Shape& shape;
  const ChunkMemory<Tr> at;
};

}  // namespace capsfast::cuda::rows
