// Launches kernels that Triton compiled, by the CUDA driver. The driver is looked up at run time, so a build without a
// CUDA toolkit launches them too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace capsfast::plans {

// What a launch takes beside the arguments of the kernel.
struct Kernel {
  void* function = nullptr;  // a CUfunction
  unsigned grid[3] = {1, 1, 1};
  unsigned threads = 32;  // of a block
  unsigned shared_bytes = 0;
  bool cooperative = false;
  bool early = false;  // may start before the kernel in front has ended (programmatic dependent launch)
};

// arguments: the addresses of the arguments. A grid without blocks is not launched.
// Throws std::runtime_error with the driver's words if it refuses.
void launch(const Kernel& kernel, void* stream, void** arguments);
void fill_with_zeros(void* address, size_t bytes, void* stream);

// torch's current stream of a GPU. Makes the device's context current if the thread has none.
void* stream_of(int32_t device);

// Whether there is a driver and, for a GPU, torch tells its stream.
bool has_driver(bool on_gpu);
// path: of a library instead of the driver, for tests.
void use_driver(const std::string& path);

}  // namespace capsfast::plans
