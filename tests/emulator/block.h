// One block of threads, each a fiber, with barriers, exchanges within a warp and shared memory. Reports misuse.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "machine.h"
#include "memory.h"

namespace capsfast::emulator {

constexpr size_t kSlot = 64;  // how many bytes a lane can give in one exchange

// What a thread waits for: none if it can run, done if it has left the kernel.
enum class Wait : uint8_t { none, barrier, cluster, grid, warp, warp_barrier, named, done };

// Which block of a launch this is.
struct Place {
  Dim grid, index;
  int cluster = 1, rank = 0;
  bool cooperative = false, early = false;
};

class Block {
 public:
  // The block of the thread that runs now, or that ran last.
  static Block& current() {
    if (running == nullptr) no_launch();
    return *running;
  }
  static Block* running;

  int thread() const { return thread_; }  // -1 while none runs
  int threads() const { return static_cast<int>(count_); }
  const Place& place() const { return place_; }

  void barrier(int line);
  void cluster_barrier(int line);
  void grid_barrier(int line);
  void warp_barrier(int line);
  void named_barrier(int id, int count, int line);
  // Gives `size` bytes to the other lanes of the warp. Returns the bytes of all 32 lanes, kSlot bytes for each. All
  // lanes must call it from the same line.
  const unsigned char* exchange(const void* value, size_t size, int line);

  unsigned char* shared(size_t offset, size_t bytes, size_t alignment) { return memory_.at(offset, bytes, alignment); }
  void reads(const void* where, size_t size) { memory_.read(where, size, now()); }
  void writes(const void* where, size_t size) { memory_.write(where, size, now()); }
  // An access to device memory, by device code or by the host.
  static void accesses(const void* where, size_t bytes) {
    if (running != nullptr && running->too_early()) check_early(where, bytes);
  }
  void wait_for_launch_before() { state().waited = true; }
  // Reads from the memory of block `rank` of the cluster, at the offset of `where` in the memory of this block.
  void read_from(int rank, const void* where, size_t size, void* to);

  // Copies of 16 bytes that each thread starts and awaits for itself, in groups. copies_wait() waits for all but the
  // last `later` groups that have ended; with 0 for all copies.
  void copy_ahead(unsigned char* to, const unsigned char* from);
  void copies_commit() { ++state().groups; }
  void copies_wait(uint32_t later = 0);

  // Bulk copies: see Arrival in csrc/cuda/device.h. offset: of the Arrival in shared memory. They arrive when the first
  // thread waits for them, so a thread that does not wait is found only if it reads before.
  void arrival_begin(size_t offset);
  void arrival_end(size_t offset);
  void arrival_expect(size_t offset, size_t bytes);
  void arrival_copy(size_t offset, unsigned char* to, const unsigned char* from, size_t bytes);
  void arrival_wait(size_t offset, bool odd);
  void release_writes() { state().released = memory_.epoch(); }

  // For the Team that runs the block. neighbours[rank] is the block of this rank in the cluster.
  void begin(const Place& place, size_t threads, size_t shared_bytes, const std::function<void()>& body,
             const std::unique_ptr<Block>* neighbours);
  // Runs until every thread has left the kernel or waits for other blocks.
  void run(bool backwards);
  bool left() const { return left_; }
  // The line of the barrier of this kind at which all threads wait, or 0.
  int waits_at(Wait wait) const;
  // All threads go on from a barrier of the cluster or of the grid.
  void go_on();
  // Where the threads are, for the message of a fault. Names neighbours at the same place once, and at most `most`
  // places.
  std::string whereabouts(int most) const;

 private:
  [[noreturn]] static void no_launch();
  static void check_early(const void* where, size_t bytes);
  // Whether the launch before may still run.
  bool too_early() const { return place_.early && !states_[static_cast<size_t>(thread_)]->waited; }
  // A copy of copy_ahead() that was not waited for.
  struct Ahead {
    unsigned char* to;
    const unsigned char* from;
    unsigned char bytes[16];  // of the source when the copy was started
    uint32_t name;            // its number in memory_
    uint32_t group;           // of its thread's copies
  };
  struct Bulk {
    unsigned char* to;
    const unsigned char* from;
    std::vector<unsigned char> bytes;  // of the source when the copy was started
    uint32_t name;
  };
  struct Arrival {
    uint32_t begun;                       // epoch
    uint32_t uses = 0;                    // that are over
    size_t expected = 0, on_the_way = 0;  // bytes
    std::vector<Bulk> copies;
  };
  Arrival& arrival(size_t offset);
  struct State {
    Fiber fiber;
    Wait wait = Wait::none;
    int line = 0;
    bool waited = false;     // for the launch before
    int named = 0;           // the id of the last named barrier
    uint32_t exchanges = 0;  // how often this thread has exchanged
    uint32_t groups = 0;     // of copies that have ended
    uint32_t released = 0;   // epoch of the last release_writes()
    std::vector<Ahead> ahead;
  };

  // A named barrier: how many threads it is for, how many of them wait, and when one of them came to its last use.
  struct Named {
    int count = 0, waiting = 0;
    Moment last;
  };
  static constexpr size_t kNamed = 16;

  State& state() { return *states_[static_cast<size_t>(thread_)]; }
  Moment now() const { return memory_.now(thread_); }
  void run_thread(size_t thread);
  bool release();
  bool release_together(size_t first, size_t count, Wait wait);
  bool release_named(size_t id);
  void leave();
  void suspend(Wait wait, int line);
  static void entry(void* self);

  Place place_;
  int thread_ = 0;
  size_t count_ = 0;
  std::vector<std::unique_ptr<State>> states_;  // never shrinks: later launches use the stacks again
  Memory memory_;
  std::map<size_t, Arrival> arrivals_;  // by offset
  std::vector<unsigned char> slots_;
  std::array<Named, kNamed> named_;
  const std::function<void()>* body_ = nullptr;
  const std::unique_ptr<Block>* neighbours_ = nullptr;
  std::exception_ptr failure_;
  bool left_ = false;
};

// Runs `body` as every thread of every block of a launch. Half of the launches run teams, blocks and threads in reverse
// order, so a result that depends on the order differs between launches.
void run_launch(const void* kernel, const Dim& grid, int threads, size_t shared_bytes, const Together& together,
                const std::function<void()>& body, const std::string& name);

}  // namespace capsfast::emulator
