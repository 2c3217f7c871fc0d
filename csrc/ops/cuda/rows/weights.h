// The weights of a few input capsules at a time, a chunk, in a block's shared memory: a ring of two or three stages.
// Asynchronous copies bring the bytes as they are while the block works on the chunks before; a warp splits them into
// TF32 parts in registers.
#pragma once

#include "../params.h"
#include "layout.h"

namespace capsfast::cuda::rows {

// How a block cuts its work, chosen by launch.h.
struct Shape {
  int strips_log;         // base 2, of the strips of 16 samples that a block has
  int streams;            // warps that share a strip; each has other input capsules
  int chunk;              // input capsules that a stage holds, a multiple of `streams`
  int stages;             // of the ring, two or three
  bool weight_in_pieces;  // a weight may be copied in pieces of 16 bytes
  bool poses_in_pieces;   // a lane may load its components of a pose at once

  CAPSFAST_HOST_DEVICE int strips() const { return 1 << strips_log; }
  CAPSFAST_HOST_DEVICE int samples() const { return kSamples << strips_log; }
  CAPSFAST_HOST_DEVICE int warps() const { return streams << strips_log; }
  CAPSFAST_HOST_DEVICE int threads() const { return 32 * warps(); }
};

// The first bytes of the block's shared memory, for the Arrivals of the stages.
constexpr int kArrivalBytes = 32;

template <class Tr>
class Weights {
 public:
  CAPSFAST_HOST_DEVICE Weights(const Inputs& inputs, const Shape& cut) : in(inputs), shape(cut) {}

  // The bytes of the Arrivals and the ring, which lie at the beginning of the block's shared memory.
  CAPSFAST_HOST_DEVICE int bytes() const { return kArrivalBytes + ring_bytes(); }
  // Input capsule `capsule` of the chunk in `stage`, in the order of ColumnPlace. E: the type in memory.
  template <class E>
  CAPSFAST_DEVICE Shared<E> at(int stage, int capsule) const {
    return gpu::shared<E>(kArrivalBytes + place(stage, capsule) * static_cast<int>(sizeof(E)), Tr::weight);
  }

  // Calls f(i, count, stage) for each chunk of the input capsules [begin, end) when it is in shared memory. All threads
  // of the block must call walk(). It begins and ends with a barrier, and has a barrier before each chunk.
  template <class F>
  CAPSFAST_DEVICE void walk(int begin, int end, const F& f) const {
    const bool bulk = in_bulk();
    const auto each_arrival = [&](const auto& visit) {
      if (!bulk || gpu::thread() != 0) return;
      for (int stage = 0; stage < shape.stages; ++stage) visit(arrival(stage));
    };
    gpu::barrier();
    each_arrival([](const gpu::Arrival& arrival) { arrival.begin(); });
    clear_padding();
    if (bulk) gpu::Arrival::release_writes();
    gpu::barrier();
    const auto next = [&](int stage) { return stage + 1 == shape.stages ? 0 : stage + 1; };
    int ahead = begin, to = 0;  // the next chunk to start, and its stage
    const auto start_next = [&] {
      if (ahead < end) start(bulk, ahead, end - ahead < shape.chunk ? end - ahead : shape.chunk, to);
      if (!bulk) gpu::copies_commit();
      ahead += shape.chunk;
      to = next(to);
    };
    for (int n = 1; n < shape.stages; ++n) start_next();
    int stage = 0;
    bool odd = false;
    for (int i = begin; i < end; i += shape.chunk) {
      if (!bulk) shape.stages == 3 ? gpu::copies_wait_but_last() : gpu::copies_wait();
      gpu::barrier();  // the copies of all threads are there, and the stage of the chunk before is free
      if (bulk) arrival(stage).wait(odd);
      start_next();
      f(i, end - i < shape.chunk ? end - i : shape.chunk, stage);
      stage = next(stage);
      odd = odd != (stage == 0);
    }
    gpu::barrier();
    each_arrival([](const gpu::Arrival& arrival) { arrival.end(); });
  }

 private:
  CAPSFAST_HOST_DEVICE int ring_bytes() const {
    return shape.stages * shape.chunk * Tr::weight * element_bytes(in.matrix.storage);
  }
  // The number of an element of the ring.
  CAPSFAST_DEVICE int place(int stage, int capsule) const { return (stage * shape.chunk + capsule) * Tr::weight; }
  CAPSFAST_DEVICE Shared<unsigned char> ring(int element, int count) const {
    const int size = element_bytes(in.matrix.storage);
    return gpu::shared<unsigned char>(kArrivalBytes + element * size, count * size);
  }
  static CAPSFAST_DEVICE gpu::Arrival arrival(int stage) { return gpu::Arrival(8 * stage); }
  CAPSFAST_DEVICE bool padded() const { return in.D != kMostD || in.K != Tr::components; }
  CAPSFAST_DEVICE bool in_bulk() const { return gpu::has_bulk_copies() && shape.weight_in_pieces && !padded(); }

  // Copies never touch padding, so it stays 0. Sums may have been where the ring is now.
  CAPSFAST_DEVICE void clear_padding() const {
    if (in.J == Tr::outputs && !padded()) return;
    const int fours = ring_bytes() / 16;
    const Shared<Four> all = gpu::shared<Four>(kArrivalBytes, fours);
    for (int n = gpu::thread(); n < fours; n += gpu::threads()) all[n] = Four{};
  }

  // Starts copying `count` input capsules from i on to `stage`.
  CAPSFAST_DEVICE void start(bool bulk, int64_t i, int count, int stage) const {
    const int length = static_cast<int>(in.J * in.D * in.K), size = element_bytes(in.matrix.storage);
    if (bulk && gpu::reread_thread_idx() > 0) return;
    if (bulk) arrival(stage).expect(count * length * size);
    // One bulk copy takes all input capsules if they are neighbours in the tensor and in the ring.
    const int together = bulk && in.matrix.stride[0] == length && length == Tr::weight ? count : 1;
#pragma unroll 1
    for (int capsule = 0; capsule < count; capsule += together) {
      const int64_t from = (i + capsule) * in.matrix.stride[0];
      const int to = place(stage, capsule), copied = together * length;
      if (bulk) {
        arrival(stage).copy(ring(to, copied), in.matrix.data, from * size, copied * size);
      } else {
        start_capsule(from, length, to);
      }
    }
  }

  // [J, D, K] from element `from` of the weight on, to element `to` of the ring. Elements that do not fit pieces of 16
  // bytes are copied synchronously.
  CAPSFAST_DEVICE void start_capsule(int64_t from, int length, int to) const {
    const int size = element_bytes(in.matrix.storage), piece = shape.weight_in_pieces ? 16 / size : 1;
    const int D = static_cast<int>(in.D), K = static_cast<int>(in.K);
#pragma unroll 1
    for (int n = gpu::reread_thread_idx() * piece; n < length; n += gpu::threads() * piece) {
      int target = to + n;
      if (padded()) {
        const int column = n / K, j = column / D;
        target = to + (j * (kMostD - D) + column) * Tr::components + n - column * K;
      }
      if (shape.weight_in_pieces) {
        gpu::copy_ahead(ring(target, piece), 0, Global<const unsigned char>(in.matrix.data), (from + n) * size);
      } else if (size == 4) {
        gpu::shared<float>(kArrivalBytes + 4 * target, 1)[0] = in.matrix.data.as<const float>()[from + n];
      } else {
        gpu::shared<uint16_t>(kArrivalBytes + 2 * target, 1)[0] = in.matrix.data.as<const uint16_t>()[from + n];
      }
    }
  }
  const Inputs& in;
  const Shape& shape;
};

}  // namespace capsfast::cuda::rows
