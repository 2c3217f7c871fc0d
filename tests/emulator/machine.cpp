#include "machine.h"

#include <algorithm>
#include <utility>

namespace capsfast::emulator {

std::string to_string(const Dim& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

Machine& Machine::current() {
  static Machine machine;
  return machine;
}

Machine& Machine::asked() {
  ++current().questions;
  return current();
}

void Machine::allow_shared(const void* kernel, int64_t bytes) {
  if (bytes < 0 || bytes + fixed_shared_bytes > shared_bytes)
    fault("no block has " + std::to_string(bytes) + " bytes of shared memory");
  allowed[kernel] = bytes;
}

void Machine::check_block(const void* kernel, int threads, int64_t shared) const {
  if (threads <= 0 || threads % kWarp != 0 || threads > kMostThreads)
    fault("a block has whole warps, 1024 threads at most");
  if (shared < 0 || shared + fixed_shared_bytes > shared_bytes)
    fault(std::to_string(shared) + " bytes of shared memory, a block can have " + std::to_string(shared_bytes));
  const auto set = allowed.find(kernel);
  const int64_t most = std::max<int64_t>(48 * 1024 - fixed_shared_bytes, set == allowed.end() ? 0 : set->second);
  if (shared > most)
    fault(std::to_string(shared) + " bytes of shared memory, the kernel may ask for " + std::to_string(most));
}

int64_t Machine::max_active_blocks(const void* kernel, int threads, int64_t shared) const {
  check_block(kernel, threads, shared);
  return std::min<int64_t>(2, shared_bytes_together / (shared + 1024));
}

int64_t Machine::max_active_clusters(const void* kernel, int size, int threads, int64_t shared) const {
  const int64_t blocks = max_active_blocks(kernel, threads, shared) * multiprocessors;
  return clusters ? blocks / size : 0;
}

void Machine::check_tensor_cores() const {
  if (architecture < 80) fault("an instruction of architecture 80 on a device of " + std::to_string(architecture));
}

void Machine::check_launch(const void* kernel, const Dim& grid, int threads, int64_t shared,
                           const Together& together) const {
  check_block(kernel, threads, shared);
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0 || grid.x > 2147483647 || grid.y > 65535 || grid.z > 65535)
    fault("no grid of " + to_string(grid));
  const int size = together.cluster;
  const std::string cluster = "clusters of " + std::to_string(size) + " blocks";
  if (size != 1 && size != 2 && size != 4 && size != 8) fault(cluster + ", 1, 2, 4 and 8 are possible");
  if (grid.x % size != 0) fault(cluster + " do not divide a grid of " + to_string(grid));
  if (size > 1 && !clusters) fault(cluster + " on a device without clusters");
  if (size > 1 && max_active_clusters(kernel, size, threads, shared) == 0) fault(cluster + " do not fit the device");
  if (!together.grid) return;
  if (!cooperative) fault("a cooperative launch on a device without");
  const int64_t most = size > 1 ? max_active_clusters(kernel, size, threads, shared) * size
                                : max_active_blocks(kernel, threads, shared) * multiprocessors;
  const int64_t blocks = grid.x * grid.y * grid.z;
  if (blocks > most)
    fault("a cooperative launch of " + std::to_string(blocks) + " blocks, the device runs " + std::to_string(most) +
          " at a time");
}

}  // namespace capsfast::emulator

// Exchanges the settings of the device with `values`.
extern "C" __attribute__((visibility("default"))) void capsfast_exchange_device(capsfast::emulator::Settings* values) {
  capsfast::emulator::Machine& now = capsfast::emulator::Machine::current();
  std::swap(static_cast<capsfast::emulator::Settings&>(now), *values);
  ++now.number;
  now.allowed.clear();
}

// How often the host queried or configured the device since the last call.
extern "C" __attribute__((visibility("default"))) int64_t capsfast_take_questions() {
  return std::exchange(capsfast::emulator::Machine::current().questions, 0);
}
