// The emulated device: its resources, the launches that it refuses, and how it reports faults.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

namespace capsfast::emulator {

// An error in a kernel that a GPU would not report: a race, an index out of bounds, a barrier that some threads never
// reach.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Throws a Fault that names the running block and thread, if one is running.
[[noreturn]] void fault(const std::string& what);

struct Dim {
  int64_t x = 1, y = 1, z = 1;
};
std::string to_string(const Dim& d);

constexpr int kWarp = 32, kMostThreads = 1024;

// Which blocks of a launch run at the same time: clusters of `cluster` blocks along x, or, if `grid`, all blocks.
struct Together {
  int cluster = 1;
  bool grid = false;
};

// The settings of the device, in the order of `device` in backend.py. Few multiprocessors, so that kernels cut even
// small shapes into several blocks. Every architecture from 8.0 on has this much shared memory, in bytes.
struct Settings {
  int64_t multiprocessors = 2, shared_bytes = 99 * 1024, shared_bytes_together = 100 * 1024;
  int64_t clusters = 1, cooperative = 1;
  int64_t crowded = 0;             // cooperative launches are refused, as if other processes used the device
  int64_t capturing = 0;           // launches are captured in a graph
  int64_t fixed_shared_bytes = 0;  // that every block has without asking for them
  int64_t architecture = 90;
};

struct Machine : Settings {
  int number = 0;  // of the device: new settings give it a new number
  int64_t questions = 0;
  // How much shared memory blocks of a kernel may ask for. Without an entry it is 48 KiB.
  std::map<const void*, int64_t> allowed;

  static Machine& current();
  // The same machine for questions of the host, which are counted.
  static Machine& asked();

  void allow_shared(const void* kernel, int64_t bytes);
  // How many blocks one multiprocessor runs at the same time. At most two, so that few blocks fill the device.
  int64_t max_active_blocks(const void* kernel, int threads, int64_t shared) const;
  // How many clusters of `size` blocks the device runs at the same time. A cluster may span all multiprocessors.
  int64_t max_active_clusters(const void* kernel, int size, int threads, int64_t shared) const;
  // Faults if the architecture has neither asynchronous copies nor products of TF32 numbers.
  void check_tensor_cores() const;
  // Faults if a GPU would refuse the launch.
  void check_launch(const void* kernel, const Dim& grid, int threads, int64_t shared, const Together& together) const;

 private:
  void check_block(const void* kernel, int threads, int64_t shared) const;
};

}  // namespace capsfast::emulator
