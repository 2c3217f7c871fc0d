// Kernels that test asynchronous copies.
#include "planted.h"

namespace planted {

namespace {

constexpr int kHalf = kThreads / 2;
using Halves = gpu::Copies<2>;

// Copies the two halves of the numbers to shared memory, as two stages. Every thread writes the number of its
// neighbour.
CAPSFAST_KERNEL(kThreads, 1)
halves(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads), other = gpu::shared<float>(512, kThreads);
  const Global<const float> in = a.in;
  const int n = gpu::thread();
  if (a.is("written just before")) box[n] = 0.0f;
  Halves copies(768);
  if (a.is("one thread takes no part") && n == 9) return;
  if (a.is("written after construction")) {
    box[n] = 0.0f;
    gpu::barrier();
  }
  copies.start(0, box, 0, in, 0, kHalf);
  copies.start(1, box, kHalf, in, kHalf, kHalf);
  if (a.is("left on its way")) return;
  if (a.is("read on its way")) a.out[n] = box[n];
  if (a.is("overwritten on its way") && n == 0) box[n] = 0.0f;
  if (a.is("source overwritten") && n == 0) a.in[1] = 0.0f;
  if (a.is("barrier of the wait")) other[n] = 0.0f;
  const bool waits = !a.is("one thread does not wait") || n != 9;
  if (waits) copies.wait(0);
  if (n < kHalf) a.out[n] = box[(n + 1) % kHalf];
  if (a.is("barrier of the wait")) a.out[n] = other[n ^ 32];
  if (a.is("threads wait for different stages")) {
    if (n < 32) copies.wait(1);
    gpu::barrier();
  }
  if (!a.is("not waited for")) copies.wait(1);
  if (n >= kHalf) a.out[n] = box[kHalf + (n + 1) % kHalf];
  if (a.is("overwritten after the wait")) box[n] = 0.0f;
}

// Copies in the same way, with a fault in the arguments of start() or wait().
CAPSFAST_KERNEL(kThreads, 1)
starts(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads + 4);
  const Global<const float> in = a.in;
  const int n = gpu::thread();
  Halves copies(768);
  int64_t from = 0;
  int to = 0, count = kHalf;
  if (a.is("source not aligned")) from = 1;
  if (a.is("destination not aligned")) to = 2;
  if (a.is("size not aligned")) count = kHalf - 2;
  if (a.is("negative size")) count = -4;
  if (a.is("beyond the source")) from = kHalf + 4;
  if (a.is("beyond the destination")) to = kHalf + 8;
  if (a.is("before the destination")) to = -4;
  if (a.is("stages overlap")) count = kHalf + 4;
  if (a.is("threads differ") && n == 9) from = 4;
  if (a.is("out of order")) copies.start(1, box, kHalf, in, kHalf, kHalf);
  if (!a.is("not started")) copies.start(0, box, to, in, from, count);
  if (a.is("started twice")) copies.start(0, box, 0, in, 0, kHalf);
  if (a.is("waited for too early")) copies.wait(0);
  const bool late = a.is("one thread starts late") && n == 9;
  if (!late && !a.is("not started")) copies.start(1, box, kHalf, in, kHalf, kHalf);
  if (a.is("one thread starts late")) gpu::barrier();
  if (late) copies.start(1, box, kHalf, in, kHalf, kHalf);
  if (a.is("a third stage")) copies.start(2, box, 0, in, 0, kHalf);
  if (a.is("waits out of order")) copies.wait(1);
  copies.wait(0);
  copies.wait(1);
  if (a.is("waited for twice")) copies.wait(1);
  a.out[n] = box[n];
}

// Accesses the shared memory that Copies itself needs.
CAPSFAST_KERNEL(kThreads, 1)
words(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads), other = gpu::shared<float>(512, kThreads);
  const int n = gpu::thread();
  if (a.is("used just before") && n == 5) gpu::shared<float>(768, 2)[1] = 0.0f;
  if (a.is("barrier of the constructor")) other[n] = 0.0f;
  const bool apart = a.is("threads make different copies") && n == 9;
  gpu::Copies<1> copies(a.is("not aligned") ? 772 : apart ? 784 : 768);
  if (a.is("barrier of the constructor")) a.out[n] = other[n ^ 32];
  if (a.is("two at one place")) gpu::Copies<2> again(760);
  if (a.is("overwritten")) gpu::shared<float>(768, 2)[n % 2] = 0.0f;
  copies.start(0, box, 0, Global<const float>(a.in), 0, kThreads);
  copies.wait(0);
  a.out[n] = box[n];
}

// A second object Copies with another place, which copies to the memory that the first has filled; and stages of size
// 0.
CAPSFAST_KERNEL(kThreads, 1)
again(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads), odd = gpu::shared<float>(900, 1);
  const int n = gpu::thread();
  gpu::Copies<1> first(512);
  first.start(0, box, 0, Global<const float>(a.in), 0, kThreads);
  first.wait(0);
  const float x = box[n ^ 1];
  if (!a.is("missing barrier")) gpu::barrier();
  gpu::Copies<3> second(520);
  second.start(0, box, 0, Global<const float>(), 1, 0);
  second.start(1, box, 0, Global<const float>(a.in), 0, kThreads);
  second.start(2, odd, 1, Global<const float>(a.in), 7, 0);
  if (a.is("second not waited for")) return;
  for (int stage = 0; stage < 3; ++stage) second.wait(stage);
  a.out[n] = x + box[n];
}

// Blocks of a cluster read what was copied to the shared memory of others.
CAPSFAST_KERNEL(kThreads, 1)
remote(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread();
  gpu::Copies<1> copies(512);
  copies.start(0, box, 0, Global<const float>(a.in), gpu::block_x() * kThreads, kThreads);
  if (a.is("waited for after the barrier")) gpu::cluster_barrier();
  copies.wait(0);
  if (!a.is("waited for after the barrier")) gpu::cluster_barrier();
  a.out[gpu::block_x() * kThreads + n] = box.read_from(gpu::cluster_rank() ^ 1, n);
  if (a.is("copied over") && gpu::cluster_rank() == 1) {
    gpu::barrier();
    gpu::Copies<1> others(520);
    others.start(0, box, 0, Global<const float>(a.in), 0, kThreads);
    others.wait(0);
  }
  gpu::cluster_barrier();
}

// Some threads copy for all, twice to one place. Every thread reads the number of its neighbour each time.
CAPSFAST_KERNEL(kThreads, 1)
ahead(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const Global<const float> in = a.in;
  const int n = gpu::thread(), next = (n + 1) % kThreads;
  const bool copies = n < kThreads / 4;
  float sum = 0.0f;
  for (int turn = 0; turn < 2; ++turn) {
    int from = 4 * (n + turn) % kThreads, to = 4 * n;
    if (a.is("source not aligned") && n == 9) from = 4 * n + 1;
    if (a.is("destination not aligned") && n == 9) to = 4 * n + 2;
    if (a.is("beyond the source") && n == 9) from = kThreads - 3;
    if (a.is("before the source") && n == 9) from = -4;
    if (a.is("beyond the destination") && n == 9) to = kThreads;
    if (a.is("copies overlap") && n == 9) to = 4 * n + 4;
    if (a.is("written just before") && copies) box[4 * n] = 0.0f;
    if (copies) gpu::copy_ahead(box, to, in, from);
    if (a.is("copied twice") && copies) gpu::copy_ahead(box, to, in, from);
    if (a.is("left on its way")) return;
    if (a.is("read on its way") && copies) sum += box[4 * n];
    if (a.is("waited for after the barrier")) gpu::barrier();
    if (a.is("waited for too late")) {
      gpu::barrier();
      sum += box[next];
      gpu::barrier();
    }
    if (a.is("overwritten on its way") && copies) box[4 * n] = 0.0f;
    if (a.is("source overwritten") && copies) a.in[from] = 0.0f;
    if (!a.is("one thread does not wait") || n != 9) gpu::copies_wait();
    if (!a.is("missing barrier") && !a.is("waited for after the barrier")) gpu::barrier();
    sum += box[next];
    if (!a.is("copied over too soon")) gpu::barrier();
  }
  a.out[n] = sum;
}

// Blocks of a cluster read what threads of others have copied.
CAPSFAST_KERNEL(kThreads, 1)
ahead_remote(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread();
  const auto block = gpu::block_x() * kThreads;
  if (n < kThreads / 4) gpu::copy_ahead(box, 4 * n, Global<const float>(a.in), block + 4 * n);
  if (a.is("waited for after the barrier")) gpu::cluster_barrier();
  gpu::copies_wait();
  if (!a.is("waited for after the barrier")) gpu::cluster_barrier();
  a.out[block + n] = box.read_from(gpu::cluster_rank() ^ 1, n);
  gpu::cluster_barrier();
}

}  // namespace

const Kernels of_copies = {
    {"halves", {halves}},
    {"starts", {starts}},
    {"words", {words}},
    {"again", {again}},
    {"ahead", {ahead}},
    {"ahead remote", {ahead_remote, kThreads, {2, 1, 1}, {2, false}}},
    {"remote", {remote, kThreads, {2, 1, 1}, {2, false}}},
};

}  // namespace planted
