// Where a call runs: its device made the current one, its stream, its size. tests/emulator has another context.cu.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <memory>

#include "device.h"

namespace capsfast::gpu {

class Context {
 public:
  // The device of `tensor`, and the stream torch works on there.
  explicit Context(const torch::stable::Tensor& tensor);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Stream stream() const { return stream_; }
  int64_t multiprocessors() const { return multiprocessors_; }
  // The most shared memory that a block may ask for.
  int64_t shared_bytes() const { return shared_bytes_; }
  // All shared memory of a multiprocessor, which its blocks share out; each takes a KiB more than it asked for.
  int64_t shared_bytes_together() const { return shared_bytes_together_; }
  // Whether a launch may consist of clusters, and of blocks that all run at the same time.
  bool clusters() const { return clusters_; }
  bool cooperative() const { return cooperative_; }

 private:
  struct Guard;
  std::unique_ptr<Guard> guard_;
  Stream stream_{};
  int64_t multiprocessors_ = 1, shared_bytes_ = 0, shared_bytes_together_ = 0;
  bool clusters_ = false, cooperative_ = false;
};

}  // namespace capsfast::gpu
