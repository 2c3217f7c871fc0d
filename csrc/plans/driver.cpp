#include "driver.h"

#include <atomic>
#include <memory>
#include <stdexcept>

#if defined(__linux__)
#include <dlfcn.h>
#endif

namespace capsfast::plans {

namespace {

// As in cuda.h, which a build without a toolkit does not have. tests/support/driver.cpp compares both.
struct LaunchAttribute {
  int id;
  char padding[4];
  union {
    int number;
    char bytes[64];
  } value;
};
struct LaunchConfig {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
constexpr int kCooperative = 2, kProgrammaticStreamSerialization = 6;

struct Driver {
  int (*launch)(const LaunchConfig*, void*, void**, void**) = nullptr;
  int (*fill)(uint64_t, unsigned char, size_t, void*) = nullptr;
  int (*name_of_error)(int, const char**) = nullptr;
  int (*current_context)(void**) = nullptr;
  int (*primary_context)(void**, int) = nullptr;
  int (*set_context)(void*) = nullptr;
  int32_t (*current_stream)(int32_t, void**) = nullptr;  // of torch

  bool complete() const { return launch && fill && name_of_error && current_context && primary_context && set_context; }
};

#if defined(__linux__)

template <class F>
void find(void* library, const char* name, F* function) {
  if (library != nullptr) *reinterpret_cast<void**>(function) = dlsym(library, name);
}

Driver load(const char* path) {
  Driver found;
  void* const driver = dlopen(path, RTLD_NOW);
  find(driver, "cuLaunchKernelEx", &found.launch);
  find(driver, "cuMemsetD8Async", &found.fill);
  find(driver, "cuGetErrorString", &found.name_of_error);
  find(driver, "cuCtxGetCurrent", &found.current_context);
  find(driver, "cuDevicePrimaryCtxRetain", &found.primary_context);
  find(driver, "cuCtxSetCurrent", &found.set_context);
  // Only a CUDA build of torch has this library, and then it is loaded.
  find(dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD), "aoti_torch_get_current_cuda_stream", &found.current_stream);
  return found;
}

#else

Driver load(const char*) { return {}; }

#endif

std::atomic<const Driver*> replaced{nullptr};

const Driver& driver() {
  static const Driver found = load("libcuda.so.1");
  const Driver* const instead = replaced.load(std::memory_order_acquire);
  return instead == nullptr ? found : *instead;
}

void check(int code, const char* what) {
  if (code == 0) return;
  const char* why = nullptr;
  driver().name_of_error(code, &why);
  throw std::runtime_error(std::string("CUDA error: ") + (why == nullptr ? "unknown" : why) + " (" + what + ")");
}

}  // namespace

bool has_driver(bool on_gpu) { return driver().complete() && (!on_gpu || driver().current_stream != nullptr); }

void use_driver(const std::string& path) {
  // Never freed: another thread may launch by it.
  replaced.store(path.empty() ? nullptr : new Driver(load(path.c_str())), std::memory_order_release);
}

void* stream_of(int32_t device) {
  const Driver& d = driver();
  void* context = nullptr;
  check(d.current_context(&context), "cuCtxGetCurrent");
  if (context == nullptr) {
    check(d.primary_context(&context, device), "cuDevicePrimaryCtxRetain");
    check(d.set_context(context), "cuCtxSetCurrent");
  }
  void* stream = nullptr;
  if (d.current_stream(device, &stream) != 0)
    throw std::runtime_error("capsfast: torch does not tell its current CUDA stream");
  return stream;
}

void launch(const Kernel& kernel, void* stream, void** arguments) {
  const auto [x, y, z] = kernel.grid;
  if (x == 0 || y == 0 || z == 0) return;
  LaunchAttribute attributes[2] = {};
  LaunchConfig config{{x, y, z}, {kernel.threads, 1, 1}, kernel.shared_bytes, stream, attributes, 0};
  const auto ask = [&](int id) {
    attributes[config.count].id = id;
    attributes[config.count++].value.number = 1;
  };
  if (kernel.early) ask(kProgrammaticStreamSerialization);
  if (kernel.cooperative) ask(kCooperative);
  check(driver().launch(&config, kernel.function, arguments, nullptr), "cuLaunchKernelEx");
}

void fill_with_zeros(void* address, size_t bytes, void* stream) {
  check(driver().fill(reinterpret_cast<uintptr_t>(address), 0, bytes, stream), "cuMemsetD8Async");
}

}  // namespace capsfast::plans
