// Kernels that test clusters and cooperative launches.
#include "planted.h"

namespace planted {

namespace {

constexpr int kRounds = 3;

// Every block gives its numbers to the block before it in the cluster.
CAPSFAST_KERNEL(kThreads, 1)
pass(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread(), size = gpu::cluster_size(), rank = gpu::cluster_rank();
  const int64_t block = gpu::block_x();
  if (rank == 1 && (a.is("a block leaves early") || (a.is("a thread leaves early") && n == 3))) return;
  box[n] = a.in[block * kThreads + n];
  if (a.is("two barriers") && rank == 2) {
    gpu::cluster_barrier();
  } else if (a.is("barrier of the block")) {
    gpu::barrier();
  } else if (a.is("barrier of another kind") && rank == 2) {
    gpu::barrier();
  } else if (!a.is("missing barrier")) {
    gpu::cluster_barrier();
  }
  const int from = a.is("wrong rank") ? rank + 1 : a.is("negative rank") ? -1 : (rank + 1) % size;
  a.out[block * kThreads + n] = box.read_from(from, a.is("wrong index") ? n + 1 : n);
  if (a.is("overwritten too soon")) box[n] = 0.0f;
  if (!a.is("missing barrier at the end")) gpu::cluster_barrier();
}

// The first block of the cluster reads the numbers of the others, which must not exit before.
CAPSFAST_KERNEL(kThreads, 1)
collect(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread(), size = gpu::cluster_size();
  const int64_t block = gpu::block_x() + gpu::blocks_x() * gpu::block_y();
  box[n] = a.in[block * kThreads + n];
  gpu::cluster_barrier();
  if (gpu::cluster_rank() == 0) {
    float sum = 0.0f;
    for (int rank = 0; rank < size; ++rank) sum += box.read_from(rank, n);
    a.out[block / size * kThreads + n] = sum;
  }
  if (!a.is("missing barrier at the end")) gpu::cluster_barrier();
}

// Sums over the cluster several times, with one barrier of the cluster for each sum. Two buffers in turn make this
// correct: a buffer that others read is written again two rounds later.
CAPSFAST_KERNEL(kThreads, 1)
rounds(Args a) {
  const Shared<float> box = gpu::shared<float>(0, 2 * kThreads);
  const int n = gpu::thread();
  float x = a.in[gpu::block_x() * kThreads + n];
  for (int round = 0; round < kRounds; ++round) {
    const int at = a.is("one buffer") ? 0 : round % 2 * kThreads;
    box[at + n] = x;
    gpu::cluster_barrier();
    x = 0.0f;
    for (int rank = 0; rank < gpu::cluster_size(); ++rank) x += box.read_from(rank, at + n);
  }
  gpu::cluster_barrier();
  a.out[gpu::block_x() * kThreads + n] = x;
}

// Sums over all blocks through device memory: every block adds up the numbers of all blocks.
CAPSFAST_KERNEL(kThreads, 1)
gather(Args a) {
  const int n = gpu::thread();
  const int64_t block = gpu::block_x() + gpu::blocks_x() * gpu::block_y(), blocks = gpu::blocks_x() * gpu::blocks_y();
  a.out[block * kThreads + n] = a.in[block * kThreads + n];
  for (int round = 0; round < 2; ++round) {
    if (block == 1 && round == 1 && a.is("a block leaves early")) return;
    if (!a.is("missing barrier before the read") || round == 1) {
      if (a.is("two barriers") && block == 1) {
        gpu::grid_barrier();
      } else {
        gpu::grid_barrier();
      }
    }
    float sum = 0.0f;
    for (int64_t other = 0; other < blocks; ++other) sum += a.out[other * kThreads + n];
    if (!a.is("missing barrier before the write")) gpu::grid_barrier();
    a.out[block * kThreads + n] = sum;
  }
}

// A cooperative launch of clusters. Each cluster sums up through shared memory, the grid through device memory.
CAPSFAST_KERNEL(kThreads, 1)
both(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread();
  box[n] = a.in[gpu::block_x() * kThreads + n];
  if (a.is("barrier of the cluster alone")) {
    gpu::cluster_barrier();
  } else {
    gpu::grid_barrier();  // is also a barrier of every cluster
  }
  float sum = 0.0f;
  for (int rank = 0; rank < gpu::cluster_size(); ++rank) sum += box.read_from(rank, n);
  a.out[gpu::block_x() * kThreads + n] = sum;
  if (a.is("barrier of the cluster alone")) {
    gpu::cluster_barrier();
  } else {
    gpu::grid_barrier();
  }
  const int64_t opposite = gpu::blocks_x() - 1 - gpu::block_x();
  const float theirs = a.out[opposite * kThreads + n];
  gpu::grid_barrier();
  a.out[gpu::block_x() * kThreads + n] = sum + 1000.0f * theirs;
}

}  // namespace

const Kernels of_a_team = {
    {"pass", {pass, kThreads, {8, 1, 1}, {4, false}}},
    {"pass in a block", {pass, kThreads, {8, 1, 1}}},
    {"collect", {collect, kThreads, {2, 2, 1}, {2, false}}},
    {"rounds", {rounds, kThreads, {4, 1, 1}, {2, false}}},
    {"gather", {gather, kThreads, {2, 2, 1}, {1, true}}},
    {"gather alone", {gather, kThreads, {2, 2, 1}}},
    {"both", {both, kThreads, {4, 1, 1}, {2, true}}},
    {"clusters of 3", {pass, kThreads, {6, 1, 1}, {3, false}}},
    {"clusters of 8", {pass, kThreads, {8, 1, 1}, {8, false}}},
    {"part of a cluster", {pass, kThreads, {6, 1, 1}, {4, false}}},
    {"many blocks", {gather, kThreads, {8, 1, 1}, {1, true}}},
};

}  // namespace planted
