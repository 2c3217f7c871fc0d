// Small kernels, each right and with a fault planted, for the tests of the emulator itself.
#include <cstring>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "../../csrc/cuda/device.h"

namespace {

using namespace capsfast;
using gpu::Global;
using gpu::Shared;

constexpr int kThreads = 64;

struct Args {
  std::string fault;  // empty: none
  Global<float> in, out;

  bool is(const char* name) const { return fault == name; }
};

// Every thread gives its number to its neighbour through shared memory.
CAPSFAST_KERNEL(kThreads, 1)
rotate(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
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

// Blocks are summed up by shuffles.
CAPSFAST_KERNEL(kThreads, 1)
sum(Args a) {
  float x = a.in[gpu::thread()];
  if (a.is("half a warp") && gpu::thread() % 32 >= 16) return;
  for (int mask = 16; mask > 0; mask /= 2) x += gpu::shuffle_xor(x, a.is("wrong mask") && mask == 4 ? 8 : mask);
  if (a.is("lane out of range")) x = gpu::shuffle(x, 32);
  a.out[gpu::thread()] = x;
}

// Threads of a warp hand numbers on in shared memory, ordered by the barrier of the warp alone.
CAPSFAST_KERNEL(kThreads, 1)
warp(Args a) {
  const Shared<float> box = gpu::shared<float>(0, kThreads);
  const int n = gpu::thread();
  box[n] = a.in[n];
  if (!a.is("missing barrier of the warp")) gpu::warp_barrier();
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

// out[16 x 8] = in[16 x 8] in[8 x 8] of one warp's tensor core.
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

// Blocks add to one number each in their turn: the result depends on which comes last.
CAPSFAST_KERNEL(32, 1)
order(Args a) {
  if (gpu::thread() == 0) a.out[0] = static_cast<float>(gpu::block_x());
}

struct Kernel {
  void (*run)(Args);
  int threads, blocks;
};

const std::map<std::string, Kernel> kernels = {
    {"rotate", {rotate, kThreads, 1}},   {"sum", {sum, kThreads, 1}},   {"warp", {warp, kThreads, 1}},
    {"diverge", {diverge, kThreads, 1}}, {"product", {product, 32, 1}}, {"order", {order, 32, 3}},
    {"odd block", {rotate, 40, 1}},
};

}  // namespace

// Runs a kernel on `size` numbers; "" or what the emulator found.
extern "C" __attribute__((visibility("default"))) const char* capsfast_run_planted(const char* kernel, const char* fault, float* in, float* out, int size) {
  static std::string found;
  found.clear();
  try {
    const Kernel& chosen = kernels.at(kernel);
    const Args args{fault, Global<float>(in, size), Global<float>(out, size)};
    gpu::launch(chosen.run, {chosen.blocks, 1, 1}, chosen.threads, kThreads * 4, {}, args);
  } catch (const emulator::Fault& fault_found) {
    found = fault_found.what();
  }
  return found.c_str();
}
