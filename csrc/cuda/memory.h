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

  // Memory that is uninitialised or, if `zeroed`, all bits 0. It lives until this object ends. The object may end
  // before the kernels have run: the caching allocator reuses memory in the order of the stream. Never null, because to
  // a kernel a null pointer means an absent argument.
  void* allocate(int64_t bytes, bool zeroed);

 private:
  struct Tensors;
  std::unique_ptr<Tensors> tensors_;
};

}  // namespace capsfast::gpu
