// gpu::Context for the emulated device.
#include "../../csrc/cuda/context.h"
#include <torch/csrc/stable/tensor.h>

#include "machine.h"

namespace capsfast::gpu {

struct Context::Guard {};

Context::Context(const torch::stable::Tensor&) {
  const emulator::Machine& machine = emulator::Machine::current();
  multiprocessors_ = machine.multiprocessors;
  shared_bytes_ = machine.shared_bytes;
  clusters_ = machine.clusters;
  cooperative_ = cooperative_wanted() && machine.cooperative;
}

Context::~Context() = default;

}  // namespace capsfast::gpu
