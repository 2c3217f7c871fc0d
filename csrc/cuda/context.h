// The device, the stream and the scratch memory of a call. tests/emulator/context_host.cpp takes the place of
// context.cpp.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

// Declares torch's tensor without its headers, which nvcc would read once for every architecture.
namespace torch::stable {
class Tensor;
}

namespace capsfast::gpu {

// An environment variable, or "". Callers read it once.
inline std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Whether launches may be cooperative. A cooperative launch needs the whole device, so it waits for kernels that stay
// on some multiprocessors for long, such as communication kernels. In a graph that is captured a refusal would come
// when the graph is instantiated, too late for another kind of launch; there only CAPSFAST_COOPERATIVE=1 makes launches
// cooperative, and 0 never.
inline bool cooperative_wanted(bool capturing) {
  static const std::string_view asked = environment("CAPSFAST_COOPERATIVE");
  return asked == "1" || (asked != "0" && !capturing);
}

// Whether kernels may start early. CAPSFAST_PDL=0 forbids it for the kernels of every backend.
inline bool early_wanted() {
  static const bool wanted = environment("CAPSFAST_PDL") != "0";
  return wanted;
}

// Whether each part of the scratch memory of a call is a tensor of its own: CAPSFAST_SCRATCH_APART=1. Then
// compute-sanitizer sees an access beyond a part.
inline bool scratch_apart() {
  static const bool apart = environment("CAPSFAST_SCRATCH_APART") == "1";
  return apart;
}

class Context {
 public:
  // Makes the device of `like` the current one for the life of this object, and takes torch's current stream there.
  explicit Context(const torch::stable::Tensor& like);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  void* stream = nullptr;
  int64_t multiprocessors = 1;
  // Whether the device has clusters. Whether it has cooperative launches, and launches that start early, and the
  // environment wants them.
  bool clusters = false, cooperative = false, early = false;
  // Whether the columns family serves also what the rows family serves: CAPSFAST_COLUMNS=1.
  bool columns_first = false;
  // Most memory for coupling coefficients and their gradients that the passes of the columns family store. The
  // canonical layer takes 24 MB. If all input capsules need more, passes make the pairs of some input capsules again
  // for the gradient.
  int64_t pairs_bytes = int64_t{256} << 20;

  // Uninitialised memory from torch's allocator. It lives until this object ends, which may be before the kernels have
  // run: the caching allocator reuses memory in the order of the stream. Never null, because to a kernel a null pointer
  // means an absent argument.
  unsigned char* scratch(int64_t bytes) const;

 private:
  struct Held;
  std::unique_ptr<Held> held_;
};

}  // namespace capsfast::gpu
