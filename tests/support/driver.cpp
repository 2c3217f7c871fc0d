// A library instead of the CUDA driver: it records launches and runs nothing.
//
// A function is the address of numbers: how many parameters the kernel has, and the bytes of each.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

// What csrc/plans/driver.cpp takes for granted.
struct Attribute {
  int id;
  char padding[4];
  int number;
  char rest[60];
};
struct Config {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned count;
};

#if __has_include(<cuda.h>)
#include <cuda.h>
static_assert(sizeof(Attribute) == sizeof(CUlaunchAttribute));
static_assert(offsetof(Attribute, number) == offsetof(CUlaunchAttribute, value));
static_assert(sizeof(Config) == sizeof(CUlaunchConfig));
static_assert(offsetof(Config, block) == offsetof(CUlaunchConfig, blockDimX));
static_assert(offsetof(Config, shared_bytes) == offsetof(CUlaunchConfig, sharedMemBytes));
static_assert(offsetof(Config, stream) == offsetof(CUlaunchConfig, hStream));
static_assert(offsetof(Config, attributes) == offsetof(CUlaunchConfig, attrs));
static_assert(offsetof(Config, count) == offsetof(CUlaunchConfig, numAttrs));
static_assert(CU_LAUNCH_ATTRIBUTE_COOPERATIVE == 2 && CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == 6);
#endif

namespace {

std::mutex one_at_a_time;
std::vector<uint64_t> launched;  // of each launch the count of its numbers, and these
int64_t until_refusal = -1;      // launches until one is refused; negative: none

}  // namespace

// These names, because cuda.h declares the functions otherwise.
extern "C" {
int launch(const Config*, void*, void**, void**) __asm__("cuLaunchKernelEx");
int fill(uint64_t, unsigned char, size_t, void*) __asm__("cuMemsetD8Async");
int name_of_error(int, const char**) __asm__("cuGetErrorString");
int current_context(void**) __asm__("cuCtxGetCurrent");
int primary_context(void**, int) __asm__("cuDevicePrimaryCtxRetain");
int set_context(void*) __asm__("cuCtxSetCurrent");

int launch(const Config* config, void* function, void** parameters, void**) {
  const std::lock_guard<std::mutex> held(one_at_a_time);
  if (until_refusal == 0) return 2;
  until_refusal -= until_refusal > 0;
  const auto* const about = static_cast<const int64_t*>(function);
  const uint64_t threads = uint64_t(config->block[0]) * config->block[1] * config->block[2];
  int flags[2] = {0, 0};
  for (unsigned n = 0; n < config->count; ++n) { flags[config->attributes[n].id == 6] = config->attributes[n].number; }
  const size_t numbers = size_t(9 + about[0]);
  if (launched.size() > 10'000) launched.clear();  // nobody takes them
  launched.insert(
      launched.end(),
      {numbers, reinterpret_cast<uintptr_t>(function), config->grid[0], config->grid[1], config->grid[2], threads,
       config->shared_bytes, reinterpret_cast<uintptr_t>(config->stream), uint64_t(flags[0]), uint64_t(flags[1])});
  for (int64_t n = 0; n < about[0]; ++n) {
    uint64_t value = 0;
    std::memcpy(&value, parameters[n], static_cast<size_t>(about[1 + n]));
    launched.push_back(value);
  }
  return 0;
}

// The addresses are of the CPU. Recorded as a launch of the function 0 with the address and the bytes.
int fill(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  const std::lock_guard<std::mutex> held(one_at_a_time);
  std::memset(reinterpret_cast<void*>(address), value, bytes);
  launched.insert(launched.end(), {11, 0, 1, 1, 1, 1, 0, reinterpret_cast<uintptr_t>(stream), 0, 0, address, bytes});
  return 0;
}

int name_of_error(int, const char** text) {
  *text = "out of resources";
  return 0;
}
int current_context(void** context) {
  *context = nullptr;
  return 0;
}
int primary_context(void**, int) { return 0; }
int set_context(void*) { return 0; }

// The launches since the last call, one in a line. refuse_after: the next launch that is refused, counted from 0.
const char* take_launches(int64_t refuse_after) {
  const std::lock_guard<std::mutex> held(one_at_a_time);
  static std::string text;
  text.clear();
  for (size_t at = 0; at < launched.size(); at += launched[at] + 1) {
    for (size_t n = 1; n <= launched[at]; ++n) text += std::to_string(launched[at + n]) + ' ';
    text += '\n';
  }
  launched.clear();
  until_refusal = refuse_after;
  return text.c_str();
}
}
