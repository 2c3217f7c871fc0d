// Small kernels that test the emulator itself, and their runs for the Python tests. Each kernel is correct, unless
// Args::fault names a fault.
#include <functional>
#include <map>
#include <string>

#include "../../csrc/cuda/device.h"
#include "../../csrc/math/half.h"

namespace planted {

using namespace capsfast;
using gpu::Global;
using gpu::Shared;

constexpr int kThreads = 64, kSharedBytes = 1024;

struct Args {
  std::string fault;
  Global<float> in, out;

  bool is(const char* name) const { return fault == name; }
};

struct alignas(8) Two {
  float numbers[2];
};

// Every thread gives its number to its neighbour through shared memory.
CAPSFAST_KERNEL(kThreads, 1)
rotate(Args a) {
  const Shared<float> box = gpu::shared<float>(a.is("beyond shared memory") ? kSharedBytes - 8 : 0, kThreads);
  const int n = gpu::thread();
  if (!a.is("unwritten") || n != 3) box[n] = a.in[n];
  if (a.is("early exit") && n == 7) return;
  if (a.is("two barriers") && n < 32) {
    gpu::barrier();
  } else if (a.is("barrier of a warp")) {
    gpu::warp_barrier();
  } else if (!a.is("missing barrier")) {
    gpu::barrier();
  }
  if (a.is("misaligned")) box.vector<Two>(1);
  const int from = a.is("wrong shared index") ? n + 1 : (n + 1) % kThreads;
  a.out[a.is("wrong index") ? n + 1 : n] = box[from];
  if (a.is("overwritten too soon")) box[n] = 0.0f;
}

// The sum of the numbers of each pair of neighbours, through shared memory, then of each warp, by shuffles.
CAPSFAST_KERNEL(kThreads, 1)
sum(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread();
  box[n] = a.in[n];
  if (!a.is("missing barrier of the warp")) gpu::warp_barrier();
  float x = box[n] + box[n ^ 1];
  if (a.is("half a warp") && n % 32 >= 16) return;
  for (int mask = 16; mask > 1; mask /= 2) x += gpu::shuffle_xor(x, mask);
  if (a.is("overwritten without a barrier") && n == 1) box[n] = 0.0f;
  a.out[n] = x;
}

// Every block gives its numbers to the block before it in the cluster.
CAPSFAST_KERNEL(kThreads, 1)
pass(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread(), size = gpu::cluster_size(), rank = gpu::cluster_rank();
  const int64_t block = gpu::block_x();
  if (rank == 1 && a.is("a thread leaves early") && n == 3) return;
  box[n] = a.in[block * kThreads + n];
  if (a.is("barrier of the block")) {
    gpu::barrier();
  } else if (!a.is("missing barrier")) {
    gpu::cluster_barrier();
  }
  a.out[block * kThreads + n] = box.read_from(a.is("wrong rank") ? rank + 1 : (rank + 1) % size, n);
  if (a.is("overwritten too soon")) box[n] = 0.0f;
  if (!a.is("missing barrier at the end")) gpu::cluster_barrier();
}

// Every block adds up the numbers of its cluster through shared memory, then the numbers of all blocks through device
// memory.
CAPSFAST_KERNEL(kThreads, 1)
gather(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread(), size = gpu::cluster_size();
  const int64_t block = gpu::block_x(), blocks = gpu::blocks_x();
  box[n] = a.in[block * kThreads + n];
  gpu::cluster_barrier();
  float x = 0.0f;
  for (int rank = 0; rank < size; ++rank) x += box.read_from(rank, n);
  a.out[block * kThreads + n] = x;
  if (a.is("barrier of the cluster alone")) {
    gpu::cluster_barrier();
  } else {
    gpu::grid_barrier();  // is also a barrier of every cluster
  }
  if (block == 1 && a.is("a block leaves early")) return;
  x = 0.0f;
  for (int64_t other = 0; other < blocks; other += size) x += a.out[other * kThreads + n];
  gpu::grid_barrier();
  a.out[block * kThreads + n] = x;
}

// Some threads copy for all, twice to the same place. Each time every thread reads the number of its neighbour.
CAPSFAST_KERNEL(kThreads, 1)
ahead(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread(), next = (n + 1) % kThreads;
  const bool copies = n < kThreads / 4;
  float sum = 0.0f;
  for (int turn = 0; turn < 2; ++turn) {
    int from = 4 * (n + turn) % kThreads, to = 4 * n;
    if (a.is("source not aligned") && n == 9) from = 4 * n + 1;
    if (a.is("beyond the source") && n == 9) from = kThreads - 3;
    if (a.is("beyond the destination") && n == 9) to = kThreads;
    if (a.is("copies overlap") && n == 9) to = 4 * n + 4;
    if (copies) gpu::copy_ahead(box, to, Global<const float>(a.in), from);
    if (a.is("left on its way")) return;
    if (a.is("read on its way") && copies) sum += box[4 * n];
    if (a.is("overwritten on its way") && copies) box[4 * n] = 0.0f;
    if (a.is("source overwritten") && copies) a.in[from] = 0.0f;
    if (!a.is("one thread does not wait") || n != 9) gpu::copies_wait();
    if (!a.is("missing barrier")) gpu::barrier();
    sum += box[next];
    if (!a.is("copied over too soon")) gpu::barrier();
  }
  a.out[n] = sum;
}

// One thread copies for all in bulk, twice to the same place. Each time every thread reads the number of its neighbour.
CAPSFAST_KERNEL(kThreads, 1)
bulk(Args a) {
  const Shared<float> box = gpu::shared<float>(16, kThreads);
  const int n = gpu::thread(), bytes = 4 * kThreads;
  const gpu::Arrival arrival(0);
  if (n == 0) arrival.begin();
  box[n] = 0.0f;
  if (!a.is("not released")) gpu::Arrival::release_writes();
  if (!a.is("begins without a barrier")) gpu::barrier();
  float sum = 0.0f;
  for (int turn = 0; turn < 2; ++turn) {
    if (n == 0) {
      arrival.expect(a.is("too few bytes") ? bytes + 16 : bytes);
      const int64_t from = a.is("beyond the source") ? 16 : 0;
      arrival.copy(gpu::shared<unsigned char>(16, bytes), a.in.as<const unsigned char>(), from, bytes);
    }
    gpu::barrier();
    if (!a.is("nobody waits")) arrival.wait(a.is("wrong turn") ? turn == 0 : turn == 1);
    sum += box[(n + 1) % kThreads];
    if (!a.is("copied over too soon")) gpu::barrier();
  }
  if (n == 0) arrival.end();
  a.out[n] = sum;
}

// Warps 0 and 1, and warps 2 and 3, give each other their numbers three times. Turns alternate between two buffers, so
// a barrier of the pair in each turn is enough.
CAPSFAST_KERNEL(2 * kThreads, 1)
meet(Args a) {
  constexpr int kAll = 2 * kThreads;
  const Shared<float> box = gpu::shared<float>(0, 2 * kAll);
  const int n = gpu::thread(), warp = n / 32;
  int id = 1 + warp / 2, count = 64;
  if (a.is("wrong pairs")) id = 1 + warp % 2;
  if (a.is("one barrier")) id = 1;
  if (a.is("barrier 0")) id = warp / 2;
  if (a.is("barrier 16")) id = 15 + warp / 2;
  if (a.is("no threads")) count = 0;
  if (a.is("part of a warp")) count = 48;
  if (a.is("more than the block")) count = 160;
  if (a.is("two counts") && warp == 3) count = 96;
  if (a.is("halves of warps")) count = 32;
  float x = a.in[n];
  for (int turn = 0; turn < 3; ++turn) {
    const int at = a.is("one buffer") ? 0 : turn % 2 * kAll;
    box[at + n] = x;
    if (a.is("halves of warps") && n % 64 >= 16 && n % 64 < 48) return;
    if (a.is("a warp leaves") && warp == 2) return;
    if (a.is("one barrier, pairs in turns")) {
      id = 1;
      if (turn == 0 && warp >= 2) gpu::any(true);
    }
    if (a.is("barrier of a warp")) {
      gpu::warp_barrier();
    } else if (!a.is("missing barrier")) {
      gpu::named_barrier(id, count);
    }
    x = box[at + (n ^ 32)] + static_cast<float>(turn);
  }
  a.out[n] = x;
}

// All warps read what warp 0 has written, twice. In between warp 0 hears through a chain of barriers that all have
// read.
CAPSFAST_KERNEL(2 * kThreads, 1)
chain(Args a) {
  const Shared<float> box = gpu::shared<float>(0, 32);
  const int n = gpu::thread(), lane = n % 32, warp = n / 32;
  float sum = 0.0f;
  for (int turn = 0; turn < 2; ++turn) {
    if (warp == 0) box[lane] = a.in[lane + turn];
    gpu::named_barrier(1, 2 * kThreads);
    sum += box[lane] + box[lane ^ 1];
    const bool too_soon = a.is("chain out of order") && warp == 1;
    if (too_soon) gpu::named_barrier(1 + warp, 64);
    if (warp < 3 && !(a.is("broken chain") && warp == 1)) gpu::named_barrier(2 + warp, 64);
    if (warp > 0 && !too_soon && !(a.is("broken chain") && warp == 2)) gpu::named_barrier(1 + warp, 64);
  }
  a.out[n] = sum;
}

// c [16, 8] = 2 a [16, 8] b [8, 8] for numbers of 16 bits. b begins in the middle of a.
template <class ToBits, class Multiply>
CAPSFAST_DEVICE void product(Args a, const ToBits& to_bits, const Multiply& multiply) {
  const int n = gpu::thread(), lane = n % 32, group = lane / 4, quad = lane % 4;
  const auto two = [&](int first, int second) {
    return to_bits(a.in[first]) | static_cast<uint32_t>(to_bits(a.in[second])) << 16;
  };
  const int at = group * 8 + quad * 2;
  const uint32_t left[2] = {two(at, at + 1), two(at + 64, at + 65)};
  const uint32_t right = two(64 + quad * 16 + group, 64 + quad * 16 + 8 + group);
  float c[4];
  multiply(c, left, right);
  if (n >= 32) return;
  for (int m = 0; m < 4; ++m) a.out[at + m % 2 + m / 2 * 64] = c[m];
}
CAPSFAST_KERNEL(kThreads, 1)
product_bf16(Args a) {
  product(a, float_to_bf16, [](float (&c)[4], const uint32_t (&left)[2], uint32_t right) {
    gpu::mma_bf16_from_zero(c, left, right);
    gpu::mma_bf16(c, left, right);
  });
}
CAPSFAST_KERNEL(kThreads, 1)
product_f16(Args a) {
  product(a, float_to_half, [](float (&c)[4], const uint32_t (&left)[2], uint32_t right) {
    gpu::mma_f16_from_zero(c, left, right);
    gpu::mma_f16(c, left, right);
  });
}

// Two launches: the first gives its numbers to the second, which may start before the first has ended. `out` is scratch
// memory.
CAPSFAST_KERNEL(kThreads, 1)
give(Args a) {
  const int n = gpu::thread();
  a.out[n] = a.in[n];
  gpu::let_next_launch_start();
}
CAPSFAST_KERNEL(kThreads, 1)
take(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread();
  gpu::let_next_launch_start();
  const float x = a.in[n];
  if (a.is("read too early")) box[n] = a.out[n];
  if (a.is("written too early") && n == 9) a.out[n] = x;
  if (a.is("copied too early") && n % 4 == 0) gpu::copy_ahead(box, n, Global<const float>(a.out), n);
  if (a.is("one thread does not wait") && n == 9) return;
  if (!a.is("nobody waits")) gpu::wait_for_launch_before();
  a.out[n] += 2 * x;
}

struct Planted {
  void (*run)(Args);
  gpu::Grid grid = {};
  gpu::Together together = {};
  int threads = kThreads;
  void (*before)(Args) = nullptr;  // a kernel that the same call launches before
};

const std::map<std::string, Planted> kernels = {
    {"rotate", {rotate}},
    {"sum", {sum}},
    {"pass", {pass, {8, 1, 1}, {4, false}}},
    {"gather", {gather, {4, 1, 1}, {2, true}}},
    {"gather alone", {gather, {4, 1, 1}, {2, false}}},
    {"ahead", {ahead}},
    {"bulk", {bulk}},
    {"meet", {meet, {}, {}, 2 * kThreads}},
    {"chain", {chain, {}, {}, 2 * kThreads}},
    {"product_bf16", {product_bf16}},
    {"product_f16", {product_f16}},
    {"take", {take, {}, {1, false, true}, kThreads, give}},
    {"take without give", {take, {}, {1, false, true}}},
    {"odd block", {rotate, {}, {}, 40}},
    {"clusters of 3", {pass, {6, 1, 1}, {3, false}}},
    {"part of a cluster", {pass, {6, 1, 1}, {4, false}}},
    {"many blocks", {gather, {8, 1, 1}, {1, true}}},
};

std::string found_by(const std::function<void()>& run) {
  try {
    run();
    return "";
  } catch (const emulator::Fault& fault) { return fault.what(); }
}

}  // namespace planted

using namespace planted;

// Runs a kernel with `size` numbers in `in` and `out`. Returns the fault that the emulator found, or "".
extern "C" __attribute__((visibility("default"))) const char* capsfast_run_planted(const char* name, const char* fault,
                                                                                   float* in, float* out, int size) {
  static std::string found;
  const Planted& kernel = kernels.at(name);
  const Args args{fault, Global<float>(in, size), Global<float>(out, size)};
  const auto* const scratch = reinterpret_cast<const unsigned char*>(out);
  emulator::Machine::current().call = {false, {{scratch, scratch + sizeof(float) * static_cast<size_t>(size)}}};
  found = found_by([&] {
    if (kernel.before != nullptr) gpu::launch(kernel.before, kernel.grid, kernel.threads, kSharedBytes, {}, args);
    if (args.is("set to zero in between")) gpu::set_zero(out, 4 * size, {});
    gpu::launch(kernel.run, kernel.grid, kernel.threads, kSharedBytes, {}, args, kernel.together);
  });
  return found.c_str();
}

// How many blocks (size 0) or clusters of `size` blocks, each of two warps, run at the same time; -1 if the emulator
// finds a fault.
extern "C" __attribute__((visibility("default"))) int64_t capsfast_planted_max_active(int size, int shared_bytes) {
  int64_t active = -1;
  found_by([&] { active = gpu::limits().max_active(rotate, size, kThreads, shared_bytes); });
  return active;
}

// Launches a kernel with `much` shared memory. Just before the launch it plans a launch with less, as another thread of
// the host may.
extern "C" __attribute__((visibility("default"))) const char* capsfast_run_planted_meanwhile(int much, int less) {
  static std::string found;
  float numbers[kThreads] = {};
  const Args args{"", Global<float>(numbers, kThreads), Global<float>(numbers, kThreads)};
  found = found_by([&] {
    gpu::limits().of(rotate);
    gpu::limits().max_active(rotate, 0, kThreads, less);
    gpu::launch_allowed(&rotate, {}, kThreads, much, args, {});
  });
  return found.c_str();
}
