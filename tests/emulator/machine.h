// The emulated device: its resources, the launches that it refuses, and how it reports faults.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

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
inline std::string to_string(const Dim& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

constexpr int kWarp = 32, kMostThreads = 1024;

// Which blocks of a launch run at the same time: clusters of `cluster` blocks along x, or, if `grid`, all blocks. If
// `early`, the launch may start before the launch before it has ended.
struct Together {
  int cluster = 1;
  bool grid = false, early = false;
};

// What a gpu::Context has seen: whether the last thing that it had the device do is a launch, and its scratch memory.
struct Call {
  struct Range {
    const unsigned char *begin, *end;
  };
  bool behind_launch = false;
  std::vector<Range> scratch;
  bool in_scratch(const void* where, size_t bytes) const {
    const unsigned char* const begin = static_cast<const unsigned char*>(where);
    return std::any_of(scratch.begin(), scratch.end(),
                       [&](const Range& range) { return begin < range.end && range.begin < begin + bytes; });
  }
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
  int64_t columns_first = 0;  // as CAPSFAST_COLUMNS=1
  int64_t pairs_bytes = int64_t{256} << 20;
};

struct Machine : Settings {
  int number = 0;  // of the device: new settings give it a new number
  int64_t questions = 0;
  Call call;
  // How much shared memory blocks of a kernel may ask for. Without an entry it is 48 KiB.
  std::map<const void*, int64_t> allowed;

  static Machine& current() {
    static Machine machine;
    return machine;
  }
  // The same machine for questions of the host, which are counted.
  static Machine& asked() {
    ++current().questions;
    return current();
  }

  void allow_shared(const void* kernel, int64_t bytes) {
    if (bytes < 0 || bytes + fixed_shared_bytes > shared_bytes)
      fault("no block has " + std::to_string(bytes) + " bytes of shared memory");
    allowed[kernel] = bytes;
  }
  // How many blocks one multiprocessor runs at the same time. At most two, so that few blocks fill the device.
  int64_t max_active_blocks(const void* kernel, int threads, int64_t shared) const {
    check_block(kernel, threads, shared);
    return std::min<int64_t>(2, shared_bytes_together / (shared + 1024));
  }
  // How many clusters of `size` blocks the device runs at the same time. A cluster may span all multiprocessors.
  int64_t max_active_clusters(const void* kernel, int size, int threads, int64_t shared) const {
    const int64_t blocks = max_active_blocks(kernel, threads, shared) * multiprocessors;
    return clusters ? blocks / size : 0;
  }
  // Faults if the architecture has neither asynchronous copies nor the products of matrices.
  void check_tensor_cores() const {
    if (architecture < 80) fault("an instruction of architecture 80 on a device of " + std::to_string(architecture));
  }
  bool starts_early() const { return architecture >= 90; }
  // Faults if a GPU would refuse the launch, or may start it too early.
  void check_launch(const void* kernel, const Dim& grid, int threads, int64_t shared, const Together& together) const {
    check_block(kernel, threads, shared);
    if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0 || grid.x > 2147483647 || grid.y > 65535 || grid.z > 65535)
      fault("no grid of " + to_string(grid));
    const int size = together.cluster;
    const std::string cluster = "clusters of " + std::to_string(size) + " blocks";
    if (size != 1 && size != 2 && size != 4 && size != 8) fault(cluster + ", 1, 2, 4 and 8 are possible");
    if (grid.x % size != 0) fault(cluster + " do not divide a grid of " + to_string(grid));
    if (size > 1 && !clusters) fault(cluster + " on a device without clusters");
    if (size > 1 && max_active_clusters(kernel, size, threads, shared) == 0) fault(cluster + " do not fit the device");
    if (together.early && !starts_early())
      fault("a launch that starts early on a device of " + std::to_string(architecture));
    if (together.early && !call.behind_launch)
      fault("a launch that starts early is not directly behind another launch of its call");
    if (!together.grid) return;
    if (!cooperative) fault("a cooperative launch on a device without");
    const int64_t most = size > 1 ? max_active_clusters(kernel, size, threads, shared) * size
                                  : max_active_blocks(kernel, threads, shared) * multiprocessors;
    const int64_t blocks = grid.x * grid.y * grid.z;
    if (blocks > most)
      fault("a cooperative launch of " + std::to_string(blocks) + " blocks, the device runs " + std::to_string(most) +
            " at a time");
  }

 private:
  void check_block(const void* kernel, int threads, int64_t shared) const {
    if (threads <= 0 || threads % kWarp != 0 || threads > kMostThreads)
      fault("a block has whole warps, 1024 threads at most");
    if (shared < 0 || shared + fixed_shared_bytes > shared_bytes)
      fault(std::to_string(shared) + " bytes of shared memory, a block can have " + std::to_string(shared_bytes));
    const auto set = allowed.find(kernel);
    const int64_t most = std::max<int64_t>(48 * 1024 - fixed_shared_bytes, set == allowed.end() ? 0 : set->second);
    if (shared > most)
      fault(std::to_string(shared) + " bytes of shared memory, the kernel may ask for " + std::to_string(most));
  }
};

}  // namespace capsfast::emulator
