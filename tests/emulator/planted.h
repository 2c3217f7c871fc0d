// Small kernels that test the emulator itself. Each is correct, unless Args::fault names a fault.
#pragma once

#include <map>
#include <string>

#include "../../csrc/cuda/device.h"

namespace planted {

using namespace capsfast;
using gpu::Global;
using gpu::Shared;

constexpr int kThreads = 64;

struct Args {
  std::string fault;  // empty for the correct kernel
  Global<float> in, out;

  bool is(const char* name) const { return fault == name; }
};

struct Kernel {
  void (*run)(Args);
  int threads = kThreads;
  gpu::Grid grid = {};
  gpu::Together together = {};
};
using Kernels = std::map<std::string, Kernel>;

constexpr int kSharedBytes = 1024;  // of every launch

extern const Kernels of_a_block, of_a_team, of_copies;

}  // namespace planted
