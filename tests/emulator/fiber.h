// A cooperative thread. It has its own stack and runs until it hands control back.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace capsfast::emulator {

class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // The next resume() calls entry(argument) on a fresh stack, whatever ran here before. entry never returns.
  void start(void (*entry)(void*), void* argument);
  void resume();   // from the scheduler into the fiber
  void suspend();  // from the fiber back into the scheduler

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace capsfast::emulator
