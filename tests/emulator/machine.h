// The emulated device: what it has, which launches it refuses, and how faults are told.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace capsfast::emulator {

// What a GPU would not tell: a race, an index out of bounds, a barrier that some threads never reach.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A Fault that names the running block and thread, where there is one.
[[noreturn]] void fault(const std::string& what);

struct Dim {
  int64_t x = 1, y = 1, z = 1;
};
std::string to_string(const Dim& d);

constexpr int kWarp = 32, kMostThreads = 1024;

// Blocks that run at the same time: clusters of this many along x, or the whole grid.
struct Together {
  int cluster = 1;
  bool grid = false;
};

// Few multiprocessors, so that small shapes are cut into several blocks, and as much shared memory as every
// architecture from 8.0 on has.
struct Machine {
  int64_t multiprocessors = 2, shared_bytes = 99 * 1024, shared_bytes_together = 100 * 1024;
  bool clusters = true, cooperative = true;
  bool crowded = false;  // others have so much of it that no cooperative launch is granted

  static Machine& current();

  // On one multiprocessor: two at most, so that little is enough to fill the device.
  int64_t blocks_at_a_time(int threads, int64_t shared) const;
  // On the device, all of whose multiprocessors can be of one cluster.
  int64_t clusters_at_a_time(int size, int threads, int64_t shared) const;
  void check_launch(const Dim& grid, int threads, int64_t shared, const Together& together) const;

 private:
  void check_block(int threads, int64_t shared) const;
};

}  // namespace capsfast::emulator
