// The weights of a few input capsules at a time, a stage, in a ring in shared memory. Asynchronous copies bring the
// bytes as they are while the block of threads works on the stages before; a warp splits them into TF32 parts in
// registers.
#pragma once

#include "layout.h"

namespace capsfast::cuda::columns {

// The first bytes of shared memory, for the Arrivals of the stages.
constexpr int kArrivalBytes = 32;

// kGap: numbers that follow every span of 16 columns. They keep lanes that read at the same time in different banks: 16
// for lanes that read neighbouring components of eight columns, 8 for lanes that read one component of columns that are
// 16 apart.
template <class Tr, int kGap>
class Ring {
 public:
  // Numbers of an input capsule and a column warp.
  static constexpr int span = kSpan * Tr::components + kGap, warp = Tr::spans * span;

  CAPSFAST_HOST_DEVICE Ring(const Inputs& inputs, const Cut& how) : in(inputs), cut(how) {}

  CAPSFAST_HOST_DEVICE int bytes() const {
    return kArrivalBytes + cut.stages * cut.chunk * cut.warps * warp * element_bytes(in.matrix.storage);
  }

  // Where a column of a column warp begins.
  static CAPSFAST_DEVICE int place_of(int column) { return column * Tr::components + column / kSpan * kGap; }

  // The weight of a column warp and input capsule `capsule` of the stage; see place_of(). E: the type in
  // memory.
  template <class E>
  CAPSFAST_DEVICE Shared<E> at(int stage, int capsule, int column_warp) const {
    return gpu::shared<E>(kArrivalBytes + place(stage, capsule, column_warp) * static_cast<int>(sizeof(E)), warp);
  }

  // Calls f(i, count, section, stage) when weights are in shared memory: for the input capsules [begin, end),
  // `cut.chunk` at a time, and for one section of output capsules or, with kAllSections, for each section. Calls
  // before() when the first copies are on their way. All threads of the block must call walk(). It begins and ends with
  // a barrier, and has a barrier before each stage.
  template <bool kAllSections, class Before, class F>
  CAPSFAST_DEVICE void walk(int begin, int end, int first_section, const Before& before, const F& f) const {
    const auto each_arrival = [&](const auto& visit) {
      if (!in_bulk() || gpu::thread() != 0) return;
      for (int stage = 0; stage < cut.stages; ++stage) visit(arrival(stage));
    };
    gpu::barrier();
    each_arrival([](const gpu::Arrival& arrival) { arrival.begin(); });
    clear();
    if (in_bulk()) gpu::Arrival::release_writes();
    gpu::barrier();
    const auto next = [&](int stage) { return stage + 1 == cut.stages ? 0 : stage + 1; };
    const auto count_of = [&](int i) { return end - i < cut.chunk ? end - i : cut.chunk; };
    const auto go_on = [&](int* i, int* section) {
      if (kAllSections && ++*section < cut.sections) return;
      *section = first_section;
      *i += cut.chunk;
    };
    int ahead = begin, section_ahead = first_section, to = 0;  // the next stage to start, and its place in the ring
    const auto start_next = [&] {
      if (ahead < end) start(ahead, count_of(ahead), section_ahead, to);
      if (!in_bulk()) gpu::copies_commit();
      go_on(&ahead, &section_ahead);
      to = next(to);
    };
    for (int n = 1; n < cut.stages; ++n) start_next();
    before();
    int stage = 0;
    bool odd = false;
#pragma unroll 1
    for (int i = begin, section = first_section; i < end; go_on(&i, &section)) {
      if (!in_bulk()) cut.stages == 3 ? gpu::copies_wait_but_last() : gpu::copies_wait();
      gpu::barrier();  // the copies of all threads are there, and the stage before is free
      if (in_bulk()) arrival(stage).wait(odd);
      start_next();
      f(i, count_of(i), section, stage);
      stage = next(stage);
      odd = odd != (stage == 0);
    }
    gpu::barrier();
    each_arrival([](const gpu::Arrival& arrival) { arrival.end(); });
  }

 private:
  // The number of an element of the ring.
  CAPSFAST_DEVICE int place(int stage, int capsule, int column_warp) const {
    return ((stage * cut.chunk + capsule) * cut.warps + column_warp) * warp;
  }
  static CAPSFAST_DEVICE gpu::Arrival arrival(int stage) { return gpu::Arrival(8 * stage); }
  CAPSFAST_DEVICE bool in_bulk() const { return gpu::has_bulk_copies() && cut.in_bulk; }
  CAPSFAST_DEVICE Shared<unsigned char> bytes_at(int element, int count) const {
    const int size = element_bytes(in.matrix.storage);
    return gpu::shared<unsigned char>(kArrivalBytes + element * size, count * size);
  }

  // Copies never touch the padding of D and K, so it stays 0. In the last section, output capsules that do not exist
  // may have the weights of another section, because their V and ds are 0. The ring may have held sums before.
  CAPSFAST_DEVICE void clear() const {
    const int fours = (bytes() - kArrivalBytes) / 16;
    const Shared<Four> all = gpu::shared<Four>(kArrivalBytes, fours);
    const int columns = cut.warps * Tr::columns, D = static_cast<int>(in.D);
    const bool padded = D != cut.lanes * kSpan || static_cast<int>(in.K) != Tr::components ||
                        static_cast<int>(in.J) * D != columns * cut.sections;
    for (int n = gpu::thread(); padded && n < fours; n += gpu::threads()) all[n] = Four{};
  }

  // Starts copying the weights of `count` input capsules from i on, for a section of the output capsules, to `stage`.
  CAPSFAST_DEVICE void start(int i, int count, int section, int stage) const {
    const int D = static_cast<int>(in.D), K = static_cast<int>(in.K), size = element_bytes(in.matrix.storage);
    const int outputs = cut.warps * cut.outputs(Tr::tiles), first_output = section * outputs;
    const int rest = static_cast<int>(in.J) - first_output, J = rest < outputs ? rest : outputs;
    const int64_t from = i * in.matrix.stride[0] + int64_t{first_output} * D * K;
    if (!in_bulk()) {
      for (int capsule = 0; capsule < count; ++capsule)
        start_capsule(from + capsule * in.matrix.stride[0], J * D, place(stage, capsule, 0));
      return;
    }
    // The lanes of a warp take turns: a copy for each span.
    const int thread = gpu::thread(), spans = J * cut.lanes, copied = kSpan * Tr::components;
    if (thread >= 32) return;
    if (thread == 0) arrival(stage).expect(count * spans * copied * size);
    for (int capsule = 0; capsule < count; ++capsule) {
      for (int n = thread; n < spans; n += 32) {
        const int to = place(stage, capsule, 0) + n * span;
        arrival(stage).copy(bytes_at(to, copied), in.matrix.data,
                            (from + capsule * in.matrix.stride[0] + n * copied) * size, copied * size);
      }
    }
  }

  // `columns` columns (j, d) from element `from` of the weight on, to element `to` of the ring.
  CAPSFAST_DEVICE void start_capsule(int64_t from, int columns, int to) const {
    const int size = element_bytes(in.matrix.storage), piece = cut.in_pieces ? 16 / size : 1;
    const int D = static_cast<int>(in.D), K = static_cast<int>(in.K);
#pragma unroll 1
    for (int n = gpu::thread() * piece; n < columns * K; n += gpu::threads() * piece) {
      const int column = n / K, j = column / D;
      const int target = to + place_of(j * cut.lanes * kSpan + column - j * D) + n - column * K;
      if (cut.in_pieces) {
        gpu::copy_ahead(bytes_at(target, piece), 0, Global<const unsigned char>(in.matrix.data), (from + n) * size);
      } else if (size == 4) {
        gpu::shared<float>(kArrivalBytes + 4 * target, 1)[0] = in.matrix.data.as<const float>()[from + n];
      } else {
        gpu::shared<uint16_t>(kArrivalBytes + 2 * target, 1)[0] = in.matrix.data.as<const uint16_t>()[from + n];
      }
    }
  }

  const Inputs& in;
  const Cut& cut;
};

}  // namespace capsfast::cuda::columns
