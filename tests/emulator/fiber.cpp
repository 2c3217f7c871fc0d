#include "fiber.h"

#include <cstdint>
#include <cstdlib>

namespace capsfast::emulator {

namespace {
constexpr size_t kStack = 64 * 1024;
}

#if defined(__x86_64__)

// Saves the callee-saved registers and the stack pointer of one side and loads the other side's. swapcontext() makes
// two system calls each time, which would take most of the run time of a kernel with many shuffles.
extern "C" void capsfast_emulator_switch(void** from, void* to);
__asm__(
    ".text\n"
    ".type capsfast_emulator_switch, @function\n"
    "capsfast_emulator_switch:\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  ret\n"
    ".size capsfast_emulator_switch, .-capsfast_emulator_switch\n");

struct Fiber::Context {
  std::unique_ptr<char[]> stack{new char[kStack]};
  void* inside = nullptr;
  void* outside = nullptr;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
};

namespace {
thread_local void (*starting_entry)(void*) = nullptr;
thread_local void* starting_argument = nullptr;
void begin() {
  starting_entry(starting_argument);
  std::abort();  // entry never returns
}
}  // namespace

void Fiber::start(void (*entry)(void*), void* argument) {
  context_->entry = entry;
  context_->argument = argument;
  const uintptr_t top = (reinterpret_cast<uintptr_t>(context_->stack.get()) + kStack) & ~uintptr_t{15};
  // The switch pops six registers and returns into begin(). The ABI wants the stack pointer at the entry of a function
  // to be 8 above a multiple of 16.
  void** frame = reinterpret_cast<void**>(top) - 2;
  frame[0] = reinterpret_cast<void*>(&begin);
  frame[1] = nullptr;
  context_->inside = frame - 6;
  for (int n = 1; n <= 6; ++n) frame[-n] = nullptr;
}

void Fiber::resume() {
  starting_entry = context_->entry;
  starting_argument = context_->argument;
  capsfast_emulator_switch(&context_->outside, context_->inside);
}

void Fiber::suspend() { capsfast_emulator_switch(&context_->inside, context_->outside); }

#else
}  // namespace capsfast::emulator

#include <ucontext.h>

namespace capsfast::emulator {

struct Fiber::Context {
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t inside{}, outside{};
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
};

namespace {
thread_local void (*starting_entry)(void*) = nullptr;
thread_local void* starting_argument = nullptr;
void begin() {
  starting_entry(starting_argument);
  std::abort();
}
}  // namespace

void Fiber::start(void (*entry)(void*), void* argument) {
  context_->entry = entry;
  context_->argument = argument;
  getcontext(&context_->inside);
  context_->inside.uc_stack.ss_sp = context_->stack.get();
  context_->inside.uc_stack.ss_size = kStack;
  context_->inside.uc_link = nullptr;
  makecontext(&context_->inside, begin, 0);
}

void Fiber::resume() {
  starting_entry = context_->entry;
  starting_argument = context_->argument;
  swapcontext(&context_->outside, &context_->inside);
}

void Fiber::suspend() { swapcontext(&context_->inside, &context_->outside); }

#endif

Fiber::Fiber() : context_(new Context) {}
Fiber::~Fiber() = default;

}  // namespace capsfast::emulator
