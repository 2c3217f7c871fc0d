#include "context.h"

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "../new_tensor.h"
#include "check.h"

// Weak, because only a CUDA build of torch has this function and the extension loads without one. From torch 2.13 on
// Stream::nativeHandle() could replace it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace capsfast::gpu {

namespace {

constexpr int kDevices = 64;

// Remembers attributes: asking the driver at every call would take longer than a small launch.
template <cudaDeviceAttr kAttribute>
int attribute_of(int device) {
  static std::atomic<int> known[kDevices];  // the value plus one; 0 is not known yet
  int value = device < kDevices ? known[device].load(std::memory_order_relaxed) - 1 : -1;
  if (value < 0) {
    check(cudaDeviceGetAttribute(&value, kAttribute, device), "cudaDeviceGetAttribute");
    if (device < kDevices) known[device].store(value + 1, std::memory_order_relaxed);
  }
  return value;
}

// Whether graphs can keep launches that start early: CUDA can from 12.3 on.
bool graphs_keep_early() {
  static const bool can = [] {
    int driver = 0;
    check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    return CUDART_VERSION >= 12030 && driver >= 12030;
  }();
  return can;
}

}  // namespace

struct Context::Held {
  torch::stable::accelerator::DeviceGuard guard;
  const torch::stable::Tensor& like;
  std::vector<torch::stable::Tensor> scratch;
};

Context::Context(const torch::stable::Tensor& like)
    : held_(new Held{torch::stable::accelerator::DeviceGuard(like.get_device_index()), like, {}}) {
  STD_TORCH_CHECK(
      aoti_torch_get_current_cuda_stream != nullptr, "capsfast: CUDA tensors need a torch that was built with CUDA");
  const int device = like.get_device_index();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  multiprocessors = attribute_of<cudaDevAttrMultiProcessorCount>(device);
  clusters = attribute_of<cudaDevAttrClusterLaunch>(device) != 0;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture), "cudaStreamIsCapturing");
  static const bool columns = environment("CAPSFAST_COLUMNS") == "1";
  columns_first = columns;
  const bool capturing = capture != cudaStreamCaptureStatusNone;
  cooperative = cooperative_wanted(capturing) && attribute_of<cudaDevAttrCooperativeLaunch>(device) != 0;
  early = early_wanted() && attribute_of<cudaDevAttrComputeCapabilityMajor>(device) >= 9 &&
          (!capturing || graphs_keep_early());
}

Context::~Context() = default;

unsigned char* Context::scratch(int64_t bytes) const {
  const int64_t size = std::max<int64_t>(bytes, 1);
  held_->scratch.push_back(new_tensor(held_->like, &size, 1, aoti_torch_dtype_uint8(), 1));
  return static_cast<unsigned char*>(held_->scratch.back().data_ptr());
}

}  // namespace capsfast::gpu
