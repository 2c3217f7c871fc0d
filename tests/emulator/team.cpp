// Launches. A team is a cluster, or all blocks of a cooperative launch. Its blocks take turns; teams run one after the
// other.
#include <algorithm>
#include <utility>

#include "block.h"

namespace capsfast::emulator {

namespace {

// How often each kernel was launched. A kernel is named by the type of its arguments and the kind of launch.
std::map<std::string, int> launched;

// Marks a launch in progress. The destructor ensures that after a fault no block counts as running.
struct Launching {
  static bool now;
  Launching() { now = true; }
  ~Launching() {
    now = false;
    Block::running = nullptr;
  }
};
bool Launching::now = false;

struct Team {
  void run(size_t count, bool backwards) {
    const size_t clusters = count / cluster;
    do {
      for (size_t n = 0; n < clusters; ++n) run_cluster((backwards ? clusters - 1 - n : n) * cluster, backwards);
    } while (release(0, count, Wait::grid));
    const auto left = [](const auto& block) { return block->left(); };
    if (!std::all_of(blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(count), left)) stuck(count);
  }

  // Runs a cluster as far as possible without the other clusters. So if a barrier of the grid is missing, a cluster runs
  // ahead and the result is wrong.
  void run_cluster(size_t first, bool backwards) {
    do {
      for (size_t n = 0; n < cluster; ++n) blocks[first + (backwards ? cluster - 1 - n : n)]->run(backwards);
    } while (release(first, cluster, Wait::cluster));
  }

  // Releases `count` blocks if all their threads wait at the same barrier. Returns whether it did.
  bool release(size_t first, size_t count, Wait wait) {
    const int line = blocks[first]->waits_at(wait);
    if (line == 0) return false;
    for (size_t n = first; n < first + count; ++n) {
      if (blocks[n]->waits_at(wait) != line) return false;
    }
    for (size_t n = first; n < first + count; ++n) blocks[n]->go_on();
    return true;
  }

  [[noreturn]] void stuck(size_t count) const {
    const auto name = [&](size_t n) { return "block " + to_string(blocks[n]->place().index); };
    const std::string what = "threads wait for each other:";
    if (count == 1) throw Fault(what + blocks[0]->whereabouts(6) + " [" + name(0) + "]");
    std::string where, before;
    int told = 0;
    for (size_t n = 0; n < count && told < 6; ++n) {
      const std::string here = blocks[n]->whereabouts(6);
      if (here == before) continue;
      where += (told++ ? "; " : " ") + name(n) + ":" + here;
      before = here;
    }
    throw Fault(what + where);
  }

  std::vector<std::unique_ptr<Block>> blocks;  // never fewer than in an earlier launch: their stacks are used again
  size_t cluster = 1;
};

}  // namespace

void run_launch(const void* kernel, const Dim& grid, int threads, size_t shared_bytes, const Together& together,
                const std::function<void()>& body, const std::string& name) {
  if (Launching::now) fault("a launch inside of a launch");
  Machine::current().check_launch(kernel, grid, threads, static_cast<int64_t>(shared_bytes), together);
  ++launched[name + (together.cluster > 1 ? " cluster" + std::to_string(together.cluster) : "") +
             (together.grid ? " cooperative" : "") + (together.early ? " early" : "")];
  Machine::current().call.behind_launch = true;
  static int64_t launches = 0;
  // The direction follows the Thue-Morse sequence. It is not periodic, so a test that repeats some launches gets other
  // directions.
  const bool backwards = __builtin_popcountll(static_cast<unsigned long long>(launches++)) % 2 == 1;
  const int64_t all = grid.x * grid.y * grid.z;
  const size_t count = static_cast<size_t>(together.grid ? all : together.cluster);
  static Team team;
  while (team.blocks.size() < count) team.blocks.push_back(std::make_unique<Block>());
  team.cluster = static_cast<size_t>(together.cluster);
  const Launching launching;
  const int64_t teams = all / static_cast<int64_t>(count);
  for (int64_t n = 0; n < teams; ++n) {
    for (size_t member = 0; member < count; ++member) {
      const int64_t m = (backwards ? teams - 1 - n : n) * static_cast<int64_t>(count) + static_cast<int64_t>(member);
      const size_t rank = member % team.cluster;
      const Place place{
          grid,
          {m % grid.x, m / grid.x % grid.y, m / grid.x / grid.y},
          together.cluster,
          static_cast<int>(rank),
          together.grid,
          together.early};
      team.blocks[member]->begin(
          place, static_cast<size_t>(threads), shared_bytes, body, team.blocks.data() + (member - rank));
    }
    team.run(count, backwards);
  }
}

}  // namespace capsfast::emulator

// The launches since the last call, a line "name count" for each kernel. Clusters, cooperative launches and launches that
// start early have longer names: "name cluster4 cooperative early count".
extern "C" __attribute__((visibility("default"))) const char* capsfast_take_launches() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : std::exchange(capsfast::emulator::launched, {}))
    text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}

// Exchanges the settings of the device with `values`.
extern "C" __attribute__((visibility("default"))) void capsfast_exchange_device(capsfast::emulator::Settings* values) {
  capsfast::emulator::Machine& now = capsfast::emulator::Machine::current();
  std::swap(static_cast<capsfast::emulator::Settings&>(now), *values);
  ++now.number;
  now.allowed.clear();
}

// How often the host queried or configured the device since the last call.
extern "C" __attribute__((visibility("default"))) int64_t capsfast_take_questions() {
  return std::exchange(capsfast::emulator::Machine::current().questions, 0);
}
