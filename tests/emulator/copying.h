// Asynchronous copies into the shared memory of one block. A copy takes the bytes of its source when the first thread
// starts it. Threads that wait for it go on when all threads have started it, and the first of them writes the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace capsfast::emulator {

// Stage `number` of the kernel's `set`-th object of the class Copies.
struct Stage {
  size_t set = 0;
  int number = 0;
};

class Copying {
 public:
  explicit Copying(Memory& memory) : memory_(memory) {}
  // Starts afresh for a new block.
  void begin(int threads);
  bool used() const { return !sets_.empty(); }
  // Called by each thread that constructs Copies. Returns the index of the set, the same for all threads.
  size_t make(size_t offset, int stages, const Moment& now);
  void start(const Stage& stage, unsigned char* to, const unsigned char* from, size_t size, const Moment& now);
  void check_wait(const Stage& stage, int thread) const;
  bool started(const Stage& stage) const;  // by all threads
  // The thread has waited for the stage: it may read what was copied.
  void arrive(const Stage& stage, int thread);
  // Called at a barrier. Faults unless all threads have started and awaited the same stages.
  void check_even() const;
  // Called when the block leaves. Faults if a copy was not waited for.
  void check_end() const;

 private:
  struct Flight {
    unsigned char* to = nullptr;
    const unsigned char* from = nullptr;
    size_t size = 0;
    std::vector<unsigned char> bytes;  // of the source when the copy was started
    uint32_t name = 0;                 // its arrival in memory_
    bool arrived = false;
  };
  struct Set {
    size_t offset;
    int stages;
    uint32_t epoch;                    // in which it was made
    std::vector<int> started, waited;  // number of stages, by thread
    std::vector<Flight> flights;
  };
  const Set& set_of(const Stage& stage) const;

  Memory& memory_;
  std::vector<Set> sets_;
  std::vector<size_t> made_;  // number of sets, by thread
};

}  // namespace capsfast::emulator
