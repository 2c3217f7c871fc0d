// A cooperative thread. It has its own stack and runs until it hands control back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace capsfast::emulator {

class Fiber {
 public:
  // The next resume() calls entry(argument) on a fresh stack, whatever ran here before. entry never returns.
  void start(void (*entry)(void*), void* argument) {
    entry_ = entry;
    argument_ = argument;
    prepare();
  }
  // From the scheduler into the fiber, and back.
  void resume() {
    starting = this;
    switch_sides(&outside_, &inside_);
  }
  void suspend() { switch_sides(&inside_, &outside_); }

 private:
  static constexpr size_t kStack = 64 * 1024;

  inline static Fiber* starting = nullptr;
  static void begin() {
    starting->entry_(starting->argument_);
    std::abort();  // entry never returns
  }

#if defined(__x86_64__)
  using Side = void*;  // the stack pointer

  // Saves the callee-saved registers and the stack pointer of one side and loads the other side's. swapcontext() makes
  // two system calls each time, which would take most of the run time of a kernel with many shuffles. noipa: else the
  // compiler may think that other registers keep their values, because it sees no use of them here.
  [[gnu::naked, gnu::noinline, gnu::noipa]] static void switch_sides(Side* /*from*/, Side* /*to*/) {
    asm("pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq (%rsi), %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret");
  }
  void prepare() {
    const uintptr_t top = (reinterpret_cast<uintptr_t>(stack_.get()) + kStack) & ~uintptr_t{15};
    // The switch pops six registers and returns into begin(). The ABI wants the stack pointer at the entry of a function
    // to be 8 above a multiple of 16.
    void** frame = reinterpret_cast<void**>(top) - 2;
    frame[0] = reinterpret_cast<void*>(&begin);
    frame[1] = nullptr;
    inside_ = frame - 6;
    for (int n = 1; n <= 6; ++n) frame[-n] = nullptr;
  }
#else
  using Side = ucontext_t;
  static void switch_sides(Side* from, Side* to) { swapcontext(from, to); }
  void prepare() {
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_.get();
    inside_.uc_stack.ss_size = kStack;
    inside_.uc_link = nullptr;
    makecontext(&inside_, begin, 0);
  }
#endif

  std::unique_ptr<char[]> stack_{new char[kStack]};
  Side inside_{}, outside_{};
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
};

}  // namespace capsfast::emulator
