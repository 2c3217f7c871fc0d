// New tensors through torch's C interface, the shortest way: no look-up of an op by its name, and on the CPU no
// dispatcher. So on the CPU torch does not fill them with NaN if it is asked to fill new memory.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/shim_utils.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "out_of_memory.h"

namespace capsfast {

// Axes of a tensor that an op makes.
constexpr size_t kMostAxes = 5;

// A tensor on a device. bytes: of an element.
inline torch::stable::Tensor new_tensor(int32_t device, int32_t index, const int64_t* sizes, const int64_t* strides,
                                        size_t axes, int32_t dtype, double bytes) {
  AtenTensorHandle made;
  if (aoti_torch_empty_strided(static_cast<int64_t>(axes), sizes, strides, dtype, device, index, &made) !=
      TORCH_SUCCESS) {
    for (size_t axis = 0; axis < axes; ++axis) bytes *= double(sizes[axis]);
    throw_no_tensor(bytes);
  }
  return torch::stable::Tensor(made);
}

// A contiguous tensor on the device of `like`.
inline torch::stable::Tensor new_tensor(const torch::stable::Tensor& like, const int64_t* sizes, size_t axes,
                                        int32_t dtype, double bytes) {
  STD_TORCH_CHECK(axes <= kMostAxes, "capsfast: a result has at most ", kMostAxes, " axes, got ", axes);
  int32_t device, index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  int64_t strides[kMostAxes];
  uint64_t stride = 1;  // unsigned, because it may exceed 64 bits; torch then refuses the tensor
  for (size_t axis = axes; axis-- > 0; stride *= static_cast<uint64_t>(std::max<int64_t>(sizes[axis], 1)))
    strides[axis] = static_cast<int64_t>(stride);
  return new_tensor(device, index, sizes, strides, axes, dtype, bytes);
}

}  // namespace capsfast
