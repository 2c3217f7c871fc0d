// Launches: blocks that run together, a cluster or a whole grid, take turns; all others run one after the other.
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
  // Runs `body` as every thread of every block. Half of the launches run teams, blocks and threads backwards, so that
  // a result that depends on their order differs from launch to launch.
  static void launch(const Dim& grid, int threads, size_t shared_bytes, const Together& together,
                     const std::function<void()>& body, const std::string& name);
  // How often kernels were launched since the last call, by what they are called with and how.
  static std::map<std::string, int> take_launches();

 private:
  void run(size_t count, bool backwards);
  void run_cluster(size_t first, bool backwards);
  bool release(size_t first, size_t count, Wait wait);
  [[noreturn]] void stuck(size_t count) const;

  std::vector<std::unique_ptr<Block>> blocks_;  // more than run where a launch before had more: stacks are kept
  size_t cluster_ = 1;
};

}  // namespace capsfast::emulator
