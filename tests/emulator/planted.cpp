// Runs the kernels of planted.h for the Python tests.
#include "planted.h"

#include <vector>

using namespace planted;

// Runs a kernel with `size` numbers in `in` and `out`. Returns the fault that the emulator found, or "".
extern "C" __attribute__((visibility("default"))) const char* capsfast_run_planted(
    const char* kernel, const char* fault, float* in, float* out, int size) {
  static std::string found;
  found.clear();
  try {
    const Kernel* chosen = nullptr;
    for (const Kernels* kernels : {&of_a_block, &of_a_team, &of_copies}) {
      if (const auto here = kernels->find(kernel); here != kernels->end()) chosen = &here->second;
    }
    if (chosen == nullptr) return "no such kernel";
    const Args args{fault, Global<float>(in, size), Global<float>(out, size)};
    gpu::launch(chosen->run, chosen->grid, chosen->threads, kSharedBytes, {}, args, chosen->together);
  } catch (const emulator::Fault& fault_found) { found = fault_found.what(); }
  return found.c_str();
}

// How many blocks (size 0) or clusters of `size` blocks run at the same time; -1 if the emulator finds a fault.
extern "C" __attribute__((visibility("default"))) int64_t capsfast_planted_max_active(int size, int threads,
                                                                                      int shared_bytes) {
  const gpu::Kernel<Args> kernel = of_a_block.at("rotate").run;
  try {
    return size == 0 ? gpu::max_active_blocks(kernel, threads, shared_bytes)
                     : gpu::max_active_clusters(kernel, size, threads, shared_bytes);
  } catch (const emulator::Fault&) { return -1; }
}

// Launches a kernel with `much` shared memory. Just before the launch it plans a launch with less, as another thread of
// the host may. own: as if each thread set the limit of the kernel to what it needs.
extern "C" __attribute__((visibility("default"))) const char* capsfast_run_planted_meanwhile(int much, int less,
                                                                                             bool own) {
  const Kernel& chosen = of_a_block.at("rotate");
  static std::string found;
  found.clear();
  try {
    std::vector<float> numbers(kThreads);
    const Args args{"", Global<float>(numbers.data(), kThreads), Global<float>(numbers.data(), kThreads)};
    gpu::allow_shared(chosen.run, much);
    gpu::max_active_blocks(chosen.run, chosen.threads, less);
    if (own) gpu::Driver::allow_shared(reinterpret_cast<const void*>(chosen.run), less);
    gpu::launch_allowed(chosen.run, chosen.grid, chosen.threads, much, args, {});
  } catch (const emulator::Fault& fault_found) { found = fault_found.what(); }
  return found.c_str();
}
