// gpu::Context for the emulated device.
#include "../../csrc/cuda/context.h"
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "machine.h"

namespace capsfast::gpu {

struct Context::Held {
  const torch::stable::Tensor& like;
  std::vector<torch::stable::Tensor> scratch;
};

Context::Context(const torch::stable::Tensor& like) : held_(new Held{like, {}}) {
  const emulator::Machine& machine = emulator::Machine::current();
  multiprocessors = machine.multiprocessors;
  clusters = machine.clusters != 0;
  cooperative = cooperative_wanted(machine.capturing != 0) && machine.cooperative != 0;
}

Context::~Context() = default;

unsigned char* Context::scratch(int64_t bytes) const {
  held_->scratch.push_back(
      torch::stable::new_empty(held_->like, {std::max<int64_t>(bytes, 1)}, torch::headeronly::ScalarType::Byte));
  return static_cast<unsigned char*>(held_->scratch.back().data_ptr());
}

}  // namespace capsfast::gpu
