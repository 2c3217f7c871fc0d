#include "team.h"

#include <algorithm>

namespace capsfast::emulator {

namespace {

std::map<std::string, int>& launched() {
  static std::map<std::string, int> counts;
  return counts;
}

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

}  // namespace

std::map<std::string, int> Team::take_launches() {
  std::map<std::string, int> taken;
  taken.swap(launched());
  return taken;
}

void Team::launch(const void* kernel, const Dim& grid, int threads, size_t shared_bytes, const Together& together,
                  const std::function<void()>& body, const std::string& name) {
  if (Launching::now) fault("a launch inside of a launch");
  Machine::current().check_launch(kernel, grid, threads, static_cast<int64_t>(shared_bytes), together);
  ++launched()[name + (together.cluster > 1 ? " cluster" + std::to_string(together.cluster) : "") +
               (together.grid ? " cooperative" : "")];
  static int64_t launches = 0;
  // The direction follows the Thue-Morse sequence. It is not periodic, so a test that repeats some launches gets other
  // directions.
  const bool backwards = __builtin_popcountll(static_cast<unsigned long long>(launches++)) % 2 == 1;
  const int64_t all = grid.x * grid.y * grid.z;
  const size_t count = static_cast<size_t>(together.grid ? all : together.cluster);
  static Team team;
  while (team.blocks_.size() < count) team.blocks_.push_back(std::make_unique<Block>());
  team.cluster_ = static_cast<size_t>(together.cluster);
  const Launching launching;
  const int64_t teams = all / static_cast<int64_t>(count);
  for (int64_t n = 0; n < teams; ++n) {
    for (size_t member = 0; member < count; ++member) {
      const int64_t m = (backwards ? teams - 1 - n : n) * static_cast<int64_t>(count) + static_cast<int64_t>(member);
      const size_t rank = member % team.cluster_;
      const Place place{grid,
                        {m % grid.x, m / grid.x % grid.y, m / grid.x / grid.y},
                        together.cluster,
                        static_cast<int>(rank),
                        together.grid};
      team.blocks_[member]->begin(
          place, static_cast<size_t>(threads), shared_bytes, body, team.blocks_.data() + (member - rank));
    }
    team.run(count, backwards);
  }
}

void Team::run(size_t count, bool backwards) {
  const size_t clusters = count / cluster_;
  do {
    for (size_t n = 0; n < clusters; ++n) run_cluster((backwards ? clusters - 1 - n : n) * cluster_, backwards);
  } while (release(0, count, Wait::grid));
  const auto left = [](const auto& block) { return block->left(); };
  if (!std::all_of(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(count), left)) stuck(count);
}

// Runs a cluster as far as possible without the other clusters. So if a barrier of the grid is missing, a cluster runs
// ahead and the result is wrong.
void Team::run_cluster(size_t first, bool backwards) {
  do {
    for (size_t n = 0; n < cluster_; ++n) blocks_[first + (backwards ? cluster_ - 1 - n : n)]->run(backwards);
  } while (release(first, cluster_, Wait::cluster));
}

// Releases `count` blocks if all their threads wait at the same barrier. Returns whether it did.
bool Team::release(size_t first, size_t count, Wait wait) {
  const int line = blocks_[first]->waits_at(wait);
  if (line == 0) return false;
  for (size_t n = first; n < first + count; ++n) {
    if (blocks_[n]->waits_at(wait) != line) return false;
  }
  for (size_t n = first; n < first + count; ++n) blocks_[n]->go_on();
  return true;
}

void Team::stuck(size_t count) const {
  const auto name = [&](size_t n) { return "block " + to_string(blocks_[n]->place().index); };
  const std::string what = "threads wait for each other:";
  if (count == 1) throw Fault(what + blocks_[0]->whereabouts(6) + " [" + name(0) + "]");
  std::string where, before;
  int told = 0;
  for (size_t n = 0; n < count && told < 6; ++n) {
    const std::string here = blocks_[n]->whereabouts(6);
    if (here == before) continue;
    where += (told++ ? "; " : " ") + name(n) + ":" + here;
    before = here;
  }
  throw Fault(what + where);
}

}  // namespace capsfast::emulator

// The launches since the last call, a line "name count" for each kernel. Clusters and cooperative launches have longer
// names: "name cluster4 cooperative count".
extern "C" __attribute__((visibility("default"))) const char* capsfast_take_launches() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : capsfast::emulator::Team::take_launches())
    text += name + " " + std::to_string(count) + "\n";
  return text.c_str();
}
