// Launches. A team is a cluster, or all blocks of a cooperative launch. Its blocks take turns; teams run one after the
// other.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "block.h"

namespace capsfast::emulator {

class Team {
 public:
  // Runs `body` as every thread of every block. Half of the launches run teams, blocks and threads in reverse order, so
  // a result that depends on the order differs between launches.
  static void launch(const void* kernel, const Dim& grid, int threads, size_t shared_bytes, const Together& together,
                     const std::function<void()>& body, const std::string& name);
  // How often each kernel was launched since the last call. A kernel is named by the type of its arguments and the kind
  // of launch.
  static std::map<std::string, int> take_launches();

 private:
  void run(size_t count, bool backwards);
  void run_cluster(size_t first, bool backwards);
  bool release(size_t first, size_t count, Wait wait);
  [[noreturn]] void stuck(size_t count) const;

  std::vector<std::unique_ptr<Block>> blocks_;  // never fewer than in an earlier launch: their stacks are used again
  size_t cluster_ = 1;
};

}  // namespace capsfast::emulator
