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
  emulator::Machine& machine = emulator::Machine::current();
  machine.call = {};
  multiprocessors = machine.multiprocessors;
  clusters = machine.clusters != 0;
  columns_first = machine.columns_first != 0;
  pairs_bytes = machine.pairs_bytes;
  cooperative = cooperative_wanted(machine.capturing != 0) && machine.cooperative != 0;
  early = early_wanted() && machine.starts_early();
}

Context::~Context() = default;

unsigned char* Context::scratch(int64_t bytes) const {
  held_->scratch.push_back(
      torch::stable::new_empty(held_->like, {std::max<int64_t>(bytes, 1)}, torch::headeronly::ScalarType::Byte));
  unsigned char* memory = static_cast<unsigned char*>(held_->scratch.back().data_ptr());
  emulator::Machine::current().call.scratch.push_back({memory, memory + bytes});
  return memory;
}

}  // namespace capsfast::gpu
