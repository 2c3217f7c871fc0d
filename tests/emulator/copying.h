// Asynchronous copies into the shared memory of one block: bytes leave when all threads have started them and arrive
// when the first thread has waited for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace capsfast::emulator {

// One stage of one object Copies of the kernel.
struct Stage {
  size_t set = 0;
  int number = 0;
};

class Copying {
 public:
  explicit Copying(Memory& memory) : memory_(memory) {}
  // Of a new block.
  void begin(int threads);
  bool used() const { return !sets_.empty(); }
  // The object Copies that this thread makes now, the same for all threads.
  size_t make(size_t offset, int stages, const Moment& now);
  void start(const Stage& stage, unsigned char* to, const unsigned char* from, size_t size, const Moment& now);
  void check_wait(const Stage& stage, int thread) const;
  bool started(const Stage& stage) const;  // by all threads
  void arrive(const Stage& stage, int thread);
  // At a barrier: every thread must have called the same functions.
  void check_even() const;
  void check_end() const;

 private:
  struct Flight {
    unsigned char* to = nullptr;
    const unsigned char* from = nullptr;
    size_t size = 0;
    std::vector<unsigned char> bytes;  // of the source when the copy started
    uint32_t name = 0;                 // to memory_
    bool arrived = false;
  };
  struct Set {
    size_t offset;
    int stages;
    uint32_t epoch;                    // when it was made
    std::vector<int> started, waited;  // stages, by thread
    std::vector<Flight> flights;
  };
  const Set& set_of(const Stage& stage) const;

  Memory& memory_;
  std::vector<Set> sets_;
  std::vector<size_t> made_;  // by thread
};

}  // namespace capsfast::emulator
