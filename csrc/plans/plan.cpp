#include "plan.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../new_tensor.h"

namespace capsfast::plans {

namespace {

// As ALIGNMENT of plan.py.
constexpr uintptr_t kAlignment = 16;

}  // namespace

std::vector<Tensor> Plan::run(std::vector<char*> addresses, Device device) const {
  std::optional<torch::stable::accelerator::DeviceGuard> guard;
  const bool gpu = device.type == aoti_torch_device_type_cuda();
  if (gpu) guard.emplace(device.index);
  std::vector<Tensor> tensors;
  tensors.reserve(made.size());
  uintptr_t bits = 0;
  for (const Form& form : made) {
    tensors.push_back(new_tensor(device.type, device.index, form.sizes.data(), form.strides.data(), form.sizes.size(),
                                 form.dtype, double(aoti_torch_dtype_element_size(form.dtype))));
    addresses.push_back(static_cast<char*>(tensors.back().data_ptr()));
    bits |= reinterpret_cast<uintptr_t>(addresses.back());
  }
  if (bits % kAlignment != 0) return {};
  void* const stream = gpu ? stream_of(device.index) : nullptr;
  std::vector<uint64_t> values;
  std::vector<void*> pointers;
  for (const Step& each : steps) {
    if (each.zero_bytes > 0) {
      const Address& at = each.addresses.front();
      fill_with_zeros(addresses[at.tensor] + at.offset, each.zero_bytes, stream);
      continue;
    }
    values = each.arguments;
    for (const Address& at : each.addresses) {
      values[at.argument] = reinterpret_cast<uintptr_t>(addresses[at.tensor] + at.offset);
    }
    pointers.clear();
    for (uint64_t& value : values) pointers.push_back(&value);
    launch(each.kernel, stream, pointers.data());
  }
  std::vector<Tensor> results;
  results.reserve(outputs.size());
  for (const size_t index : outputs) results.push_back(tensors[index]);
  return results;
}

}  // namespace capsfast::plans
