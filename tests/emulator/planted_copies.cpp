// Kernels that test asynchronous copies.
#include "planted.h"

namespace planted {

namespace {

// Some threads copy for all, twice to the same place. Each time every thread reads the number of its neighbour.
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

// Blocks of a cluster read numbers that threads of other blocks copied.
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

}  // namespace

const Kernels of_copies = {
    {"ahead", {ahead}},
    {"bulk", {bulk}},
    {"ahead remote", {ahead_remote, kThreads, {2, 1, 1}, {2, false}}},
};

}  // namespace planted
