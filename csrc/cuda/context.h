// The device and the stream of a call. tests/emulator/context_host.cpp takes the place of context.cpp.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "tensor.h"

namespace capsfast::gpu {

// Whether launches may be cooperative. A cooperative launch needs the whole device, so it waits for kernels that stay
// on some multiprocessors for long, such as communication kernels. The environment variable is read once.
inline bool cooperative_wanted() {
  static const bool wanted = [] {
    const char* value = std::getenv("CAPSFAST_COOPERATIVE");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return wanted;
}

class Context {
 public:
  // Makes the device of `tensor` the current one for the life of this object, and takes torch's current stream there.
  explicit Context(const torch::stable::Tensor& tensor);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void* stream() const { return stream_; }
  int64_t multiprocessors() const { return multiprocessors_; }
  // The most shared memory that a block may ask for, in bytes.
  int64_t shared_bytes() const { return shared_bytes_; }
  // Whether the device has clusters, and whether it has cooperative launches and they are wanted.
  bool clusters() const { return clusters_; }
  bool cooperative() const { return cooperative_; }

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
  void* stream_ = nullptr;
  int64_t multiprocessors_ = 1, shared_bytes_ = 0;
  bool clusters_ = false, cooperative_ = false;
};

}  // namespace capsfast::gpu
