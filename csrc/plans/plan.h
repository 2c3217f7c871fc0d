// A plan of capsfast/triton/plan.py as C++ runs it: it allocates, launches, and returns what it allocated.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

#include "driver.h"

namespace capsfast::plans {

using torch::stable::Tensor;

// A tensor that a run makes.
struct Form {
  int32_t dtype;  // in torch's numbering
  std::vector<int64_t> sizes, strides;
};

struct Device {
  int32_t type, index;
};

// An argument that is an address: `offset` bytes into a tensor of the run.
struct Address {
  size_t argument, tensor;
  int64_t offset;
};

// A launch of a kernel or, with zero_bytes, bytes that are set to 0 at the only address.
struct Step {
  Kernel kernel;
  std::vector<uint64_t> arguments;  // addresses are filled in by a run
  std::vector<Address> addresses;
  size_t zero_bytes = 0;
};

// The tensors of a run: first the tensors of the call, then the tensors that the run makes.
struct Plan {
  std::vector<Form> made;
  std::vector<Step> steps;
  std::vector<size_t> outputs;  // indices into made

  // The outputs; none if torch's allocator returned memory that is not aligned as the kernels expect. addresses: of
  // the tensors of the call.
  std::vector<Tensor> run(std::vector<char*> addresses, Device device) const;
};

}  // namespace capsfast::plans
