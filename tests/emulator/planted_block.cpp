// Kernels that test what one block does: barriers, shuffles, shared memory, tensor cores.
#include "planted.h"

namespace planted {

namespace {

// Every thread gives its number to its neighbour through shared memory.
CAPSFAST_KERNEL(kThreads, 1)
rotate(Args a) {
  const int at = a.is("before shared memory") ? -8 : a.is("beyond shared memory") ? kSharedBytes - 8 : 0;
  const Shared<float> box = gpu::shared<float>(at, kThreads);
  const int n = gpu::thread();
  if (!a.is("unwritten") || n != 3) box[n] = a.in[n];
  if (a.is("missing barrier in a warp")) {
    gpu::warp_barrier();
  } else if (!a.is("missing barrier")) {
    gpu::barrier();
  }
  const int from = (n + 1) % kThreads;
  a.out[a.is("wrong index") ? n + 1 : n] = box[a.is("wrong shared index") && n == kThreads - 1 ? kThreads : from];
  if (a.is("overwritten too soon")) box[n] = 0.0f;
}

// Sums up the numbers of each warp by shuffles.
CAPSFAST_KERNEL(kThreads, 1)
sum(Args a) {
  float x = a.in[gpu::thread()];
  if (a.is("half a warp") && gpu::thread() % 32 >= 16) return;
  for (int mask = 16; mask > 0; mask /= 2) x += gpu::shuffle_xor(x, a.is("wrong mask") && mask == 4 ? 8 : mask);
  if (a.is("lane out of range")) x = gpu::shuffle(x, 32);
  a.out[gpu::thread()] = x;
}

// Neighbouring threads of a warp exchange numbers in shared memory, with barriers of the warp only. Then both read a
// number, and one of them overwrites it.
CAPSFAST_KERNEL(kThreads, 1)
warp(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread(), even = n / 2 * 2;
  box[n] = a.in[n];
  if (!a.is("missing barrier of the warp")) gpu::warp_barrier();
  const float sum = box[even] + box[even + 1];
  if (!a.is("overwritten too soon")) gpu::warp_barrier();
  if (n == even) {
    box[n] = sum;
    box[n] += a.in[n];
  }
  if (!a.is("read too soon")) gpu::warp_barrier();
  a.out[n] = box[n ^ 1];
}

CAPSFAST_KERNEL(kThreads, 1)
diverge(Args a) {
  if (a.is("two barriers")) {
    if (gpu::thread() < 32) {
      gpu::barrier();
    } else {
      gpu::barrier();
    }
  } else if (!a.is("early exit") || gpu::thread() != 7) {
    gpu::barrier();
  }
  if (!a.is("early exit") || gpu::thread() != 7) a.out[gpu::thread()] = a.in[gpu::thread()];
}

// Both warps read the first number, and then a thread of the first warp overwrites it.
CAPSFAST_KERNEL(kThreads, 1)
reread(Args a) {
  const Shared<float> box = gpu::shared<float>(0, 1);
  const int n = gpu::thread();
  if (n == 0) box[0] = a.in[0];
  gpu::barrier();
  if (n % 32 < 6) a.out[n] = box[0];
  if (a.is("read by another warp")) {
    gpu::warp_barrier();
  } else {
    gpu::barrier();
  }
  if (n == 6) box[0] = a.in[n];
  gpu::barrier();
  if (n % 32 >= 6) a.out[n] = box[0];
}

struct alignas(16) Quad {
  float numbers[4];
};

// Reads four numbers at once from shared memory and writes them in the opposite order.
CAPSFAST_KERNEL(kThreads, 1)
vectors(Args a) {
  const Shared<float> box = gpu::shared<float>(16, kThreads);
  const int n = gpu::thread();
  box[n] = a.in[n];
  if (!a.is("missing barrier")) gpu::barrier();
  if (n >= kThreads / 4) return;
  const int from = a.is("wrong index") && n == 0 ? kThreads - 3 : 4 * n + (a.is("misaligned") && n == 0 ? 2 : 0);
  const Quad quad = box.vector<Quad>(from);
  if (a.is("misaligned in memory") && n == 0) a.out.from(1, kThreads - 1).as<Quad>()[0] = quad;
  for (int m = 0; m < 4; ++m) a.out[kThreads - 1 - (4 * n + m)] = quad.numbers[m];
}

// out [16, 8] = in [16, 8] in [8, 8], one product of tensor cores.
CAPSFAST_KERNEL(32, 1)
product(Args a) {
  const int group = gpu::thread() / 4, quad = gpu::thread() % 4;
  float left[4], right[2], c[4] = {0, 0, 0, 0};
  for (int n = 0; n < 4; ++n) left[n] = a.in[(group + n % 2 * 8) * 8 + quad + n / 2 * 4];
  for (int n = 0; n < 2; ++n) right[n] = a.in[(quad + n * 4) * 8 + group];
  if (a.is("rounded")) {
    for (float& x : left) x = gpu::to_tf32(x);
  }
  gpu::mma_tf32(c, left, right);
  for (int n = 0; n < 4; ++n) a.out[(group + n / 2 * 8) * 8 + 2 * quad + n % 2] = c[n];
}

// Every block writes its index to the same element, so the result depends on which block runs last.
CAPSFAST_KERNEL(32, 1)
order(Args a) {
  if (gpu::thread() == 0) a.out[0] = static_cast<float>(gpu::block_x());
}

}  // namespace

const Kernels of_a_block = {
    {"rotate", {rotate}},        {"sum", {sum}},         {"warp", {warp}},           {"reread", {reread}},
    {"vectors", {vectors}},      {"diverge", {diverge}}, {"product", {product, 32}}, {"order", {order, 32, {3, 1, 1}}},
    {"odd block", {rotate, 40}},
};

}  // namespace planted
