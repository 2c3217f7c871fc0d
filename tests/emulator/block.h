// One block of threads at a time, each thread a fiber: barriers, exchanges within a warp, and what goes wrong there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fiber.h"

namespace capsfast::emulator {

// What a GPU would not tell: a race, an index out of bounds, a barrier that some threads never reach.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Dim {
  int64_t x = 1, y = 1, z = 1;
};

constexpr int kWarp = 32;
constexpr size_t kSlot = 64;  // bytes a lane gives away in one exchange

// When a thread touched shared memory: accesses are ordered if a barrier of the block lies between them, or one of
// the warp they both belong to.
struct Moment {
  int thread = -1;
  uint32_t block_epoch = 0, warp_epoch = 0;
};

class Block {
 public:
  // Runs `body` as every thread of every block. Half of the launches run blocks and threads backwards, so that a
  // result that depends on their order differs from launch to launch.
  static void launch(Dim grid, int threads, size_t shared_bytes, const std::function<void()>& body, const std::string& name = "");
  static Block& current();
  // How often kernels were launched since the last call, by what they are called with.
  static std::map<std::string, int> take_launches();

  int thread() const { return running_; }
  int threads() const { return static_cast<int>(states_.size()); }
  Dim index() const { return index_; }
  Dim grid() const { return grid_; }

  void barrier(int line);
  void warp_barrier(int line);
  // Gives `size` bytes to the warp; returns the 32 slots, kSlot bytes each. All lanes must call it at one line.
  const unsigned char* exchange(const void* value, size_t size, int line);

  unsigned char* shared(size_t offset, size_t bytes, size_t alignment);
  void reads(const void* where, size_t size);
  void writes(const void* where, size_t size);

 private:
  enum class Wait { none, barrier, warp, done };
  struct State {
    Fiber fiber;
    Wait wait = Wait::none;
    int line = 0;
    uint32_t exchanges = 0;
  };
  struct Shadow {
    Moment writer, reader;
    bool readers = false;  // more than one thread has read since
  };

  void run_block(const std::function<void()>& body, bool backwards);
  void run_thread(int thread);
  bool release();
  void suspend(Wait wait, int line);
  [[noreturn]] void stuck() const;
  [[noreturn]] void fault(const std::string& what) const;
  bool ordered(const Moment& before) const;
  Moment now() const;
  Shadow& shadow(const void* where, size_t size);
  static void entry(void* self);

  Dim grid_, index_;
  int running_ = 0;
  std::vector<std::unique_ptr<State>> states_;
  std::vector<unsigned char> shared_;
  std::vector<Shadow> shadows_;
  std::vector<unsigned char> slots_;
  uint32_t block_epoch_ = 0;
  std::vector<uint32_t> warp_epoch_;
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr failure_;
};

}  // namespace capsfast::emulator
