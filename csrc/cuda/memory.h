// Scratch memory from torch's allocator.
#pragma once

#include <cstdint>
#include <memory>

#include "tensor.h"

namespace capsfast::gpu {

class Memory {
 public:
  // On the device of `like`.
  explicit Memory(const torch::stable::Tensor& like);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Uninitialised, or all bits 0, until this object ends. That may be before the kernels have run: the caching
  // allocator reuses memory in the order of the stream. Never null, because a null pointer is an absent argument to a
  // kernel.
  void* allocate(int64_t bytes, bool zeroed);

 private:
  struct Tensors;
  std::unique_ptr<Tensors> tensors_;
};

}  // namespace capsfast::gpu
