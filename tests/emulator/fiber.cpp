#include "fiber.h"

#include <cstdint>
#include <cstdlib>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace capsfast::emulator {

namespace {

constexpr size_t kStack = 64 * 1024;

thread_local void (*starting_entry)(void*) = nullptr;
thread_local void* starting_argument = nullptr;
void begin() {
  starting_entry(starting_argument);
  std::abort();  // entry never returns
}

}  // namespace

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

using Side = void*;  // the stack pointer
static inline void switch_sides(Side& from, Side& to) { capsfast_emulator_switch(&from, to); }
static void prepare(Side& side, char* stack) {
  const uintptr_t top = (reinterpret_cast<uintptr_t>(stack) + kStack) & ~uintptr_t{15};
  // The switch pops six registers and returns into begin(). The ABI wants the stack pointer at the entry of a function
  // to be 8 above a multiple of 16.
  void** frame = reinterpret_cast<void**>(top) - 2;
  frame[0] = reinterpret_cast<void*>(&begin);
  frame[1] = nullptr;
  side = frame - 6;
  for (int n = 1; n <= 6; ++n) frame[-n] = nullptr;
}

#else

using Side = ucontext_t;
static inline void switch_sides(Side& from, Side& to) { swapcontext(&from, &to); }
static void prepare(Side& side, char* stack) {
  getcontext(&side);
  side.uc_stack.ss_sp = stack;
  side.uc_stack.ss_size = kStack;
  side.uc_link = nullptr;
  makecontext(&side, begin, 0);
}

#endif

struct Fiber::Context {
  std::unique_ptr<char[]> stack{new char[kStack]};
  Side inside{}, outside{};
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
};

void Fiber::start(void (*entry)(void*), void* argument) {
  context_->entry = entry;
  context_->argument = argument;
  prepare(context_->inside, context_->stack.get());
}

void Fiber::resume() {
  starting_entry = context_->entry;
  starting_argument = context_->argument;
  switch_sides(context_->outside, context_->inside);
}

void Fiber::suspend() { switch_sides(context_->inside, context_->outside); }

Fiber::Fiber() : context_(new Context) {}
Fiber::~Fiber() = default;

}  // namespace capsfast::emulator
