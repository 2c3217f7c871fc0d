// The error of a call whose memory the system does not have.
#pragma once

#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(__linux__)
// Weak, because torch has this function from 2.13 on.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();
#endif

namespace capsfast {

// Says how much memory was asked for. capsfast/calls/checks.py makes a MemoryError of the text, and on a GPU a
// torch.OutOfMemoryError.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(double bytes) { std::snprintf(text_, sizeof(text_), "std::bad_alloc of %.0f bytes", bytes); }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[128];
};

// After torch failed to make a tensor of this size. On a GPU the reason may be an earlier kernel, whose error is kept.
[[noreturn]] inline void throw_no_tensor(double bytes) {
#if defined(__linux__)
  const auto what = torch_exception_get_what_without_backtrace;
  const char* const text = what == nullptr ? nullptr : what();
  if (text != nullptr && std::strstr(text, "CUDA error") != nullptr) throw std::runtime_error(text);
#endif
  throw OutOfMemory(bytes);
}

}  // namespace capsfast
