#include "memory.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

namespace capsfast::gpu {

struct Memory::Tensors {
  const torch::stable::Tensor& like;
  std::vector<torch::stable::Tensor> held;
};

Memory::Memory(const torch::stable::Tensor& like) : tensors_(new Tensors{like, {}}) {}
Memory::~Memory() = default;

void* Memory::allocate(int64_t bytes, bool zeroed) {
  using torch::headeronly::ScalarType;
  tensors_->held.push_back(torch::stable::new_empty(tensors_->like, {std::max<int64_t>(bytes, 1)}, ScalarType::Byte));
  torch::stable::Tensor& tensor = tensors_->held.back();
  if (zeroed) torch::stable::zero_(tensor);
  return tensor.data_ptr();
}

}  // namespace capsfast::gpu
