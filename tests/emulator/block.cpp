#include "block.h"

#include <algorithm>
#include <cstring>

namespace capsfast::emulator {

namespace {

Block* active = nullptr;
// Stacks are kept from launch to launch.
Block& instance() {
  static Block block;
  return block;
}
std::map<std::string, int>& launched() {
  static std::map<std::string, int> counts;
  return counts;
}
constexpr size_t kGranule = 2;  // bytes of shared memory with a shadow of their own: the smallest element

std::string at(const Dim& d) { return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")"; }

}  // namespace

std::map<std::string, int> Block::take_launches() {
  std::map<std::string, int> taken;
  taken.swap(launched());
  return taken;
}

Block& Block::current() {
  if (active == nullptr) throw Fault("device code outside of a launch");
  return *active;
}

void Block::launch(Dim grid, int threads, size_t shared_bytes, const std::function<void()>& body, const std::string& name) {
  ++launched()[name];
  if (threads <= 0 || threads % kWarp != 0 || threads > 1024) throw Fault("a block has whole warps, 1024 threads at most");
  if (grid.x <= 0 || grid.y <= 0 || grid.z <= 0 || grid.x > 2147483647 || grid.y > 65535 || grid.z > 65535) throw Fault("no grid of " + at(grid));
  if (shared_bytes > 227 * 1024) throw Fault("more shared memory than a block can have: " + std::to_string(shared_bytes));
  if (active != nullptr) throw Fault("a launch inside of a launch");
  static int64_t launches = 0;
  // The sequence of Thue and Morse: no call of several launches meets the same directions again and again.
  const bool backwards = __builtin_popcountll(static_cast<unsigned long long>(launches++)) % 2 == 1;
  Block& block = instance();
  block.grid_ = grid;
  while (block.states_.size() < static_cast<size_t>(threads)) block.states_.push_back(std::make_unique<State>());
  block.states_.resize(static_cast<size_t>(threads));
  block.shared_.resize(shared_bytes);
  block.shadows_.resize(shared_bytes / kGranule + 1);
  block.slots_.resize(2 * kSlot * static_cast<size_t>(threads));
  active = &block;
  try {
    const int64_t blocks = grid.x * grid.y * grid.z;
    for (int64_t n = 0; n < blocks; ++n) {
      const int64_t m = backwards ? blocks - 1 - n : n;
      block.index_ = {m % grid.x, m / grid.x % grid.y, m / grid.x / grid.y};
      block.run_block(body, backwards);
    }
  } catch (...) {
    active = nullptr;
    throw;
  }
  active = nullptr;
}

void Block::run_block(const std::function<void()>& body, bool backwards) {
  body_ = &body;
  failure_ = nullptr;
  block_epoch_ = 0;
  warp_epoch_.assign(states_.size() / kWarp, 0);
  // NaN in every floating type, and no valid index.
  std::fill(shared_.begin(), shared_.end(), static_cast<unsigned char>(0xFF));
  std::fill(shadows_.begin(), shadows_.end(), Shadow{});
  for (auto& state : states_) {
    state->wait = Wait::none;
    state->exchanges = 0;
    state->fiber.start(&Block::entry, this);
  }
  const int count = threads();
  for (;;) {
    for (int n = 0; n < count; ++n) {
      const int thread = backwards ? count - 1 - n : n;
      if (states_[static_cast<size_t>(thread)]->wait == Wait::none) run_thread(thread);
      if (failure_ != nullptr) std::rethrow_exception(failure_);
    }
    const bool done = std::all_of(states_.begin(), states_.end(), [](const auto& s) { return s->wait == Wait::done; });
    if (done) return;
    if (!release()) stuck();
  }
}

void Block::run_thread(int thread) {
  running_ = thread;
  states_[static_cast<size_t>(thread)]->fiber.resume();
}

void Block::entry(void* self) {
  Block& block = *static_cast<Block*>(self);
  const size_t thread = static_cast<size_t>(block.running_);
  try {
    (*block.body_)();
  } catch (...) {
    block.failure_ = std::current_exception();
  }
  block.states_[thread]->wait = Wait::done;
  block.states_[thread]->fiber.suspend();
}

void Block::suspend(Wait wait, int line) {
  State& state = *states_[static_cast<size_t>(running_)];
  state.wait = wait;
  state.line = line;
  state.fiber.suspend();
}

// Lets go whoever is complete: all lanes of a warp at one exchange, or all threads at one barrier.
bool Block::release() {
  const auto together = [&](size_t first, size_t count, Wait wait) {
    for (size_t n = first; n < first + count; ++n) {
      if (states_[n]->wait != wait || states_[n]->line != states_[first]->line) return false;
    }
    for (size_t n = first; n < first + count; ++n) states_[n]->wait = Wait::none;
    return true;
  };
  bool any = false;
  for (size_t warp = 0; warp < states_.size() / kWarp; ++warp) any |= together(warp * kWarp, kWarp, Wait::warp);
  if (any) return true;
  if (!together(0, states_.size(), Wait::barrier)) return false;
  ++block_epoch_;
  return true;
}

void Block::stuck() const {
  std::string what = "threads wait for each other:";
  const char* names[] = {"runs", "at the barrier", "in the exchange of its warp", "has left the kernel"};
  const State* before = nullptr;
  int told = 0;
  for (size_t n = 0; n < states_.size() && told < 6; ++n) {
    const State& state = *states_[n];
    if (before != nullptr && before->wait == state.wait && before->line == state.line) continue;
    what += (told++ ? "; thread " : " thread ") + std::to_string(n) + " " + names[static_cast<int>(state.wait)];
    if (state.wait != Wait::done) what += " of line " + std::to_string(state.line);
    before = &state;
  }
  fault(what);
}

void Block::fault(const std::string& what) const {
  throw Fault(what + " [block " + at(index_) + ", thread " + std::to_string(running_) + "]");
}

void Block::barrier(int line) { suspend(Wait::barrier, line); }

void Block::warp_barrier(int line) {
  // Every lane arrives before any goes on, so each may count the epoch up by its own share.
  suspend(Wait::warp, line);
  const size_t warp = static_cast<size_t>(running_) / kWarp;
  State& state = *states_[static_cast<size_t>(running_)];
  warp_epoch_[warp] = std::max(warp_epoch_[warp], ++state.exchanges);
}

const unsigned char* Block::exchange(const void* value, size_t size, int line) {
  if (size > kSlot) fault("an exchange of more than " + std::to_string(kSlot) + " bytes");
  State& state = *states_[static_cast<size_t>(running_)];
  // Two sets of slots in turn: no lane writes the set that others still read.
  unsigned char* set = slots_.data() + (state.exchanges++ % 2 == 0 ? 0 : slots_.size() / 2);
  std::memcpy(set + static_cast<size_t>(running_) * kSlot, value, size);
  suspend(Wait::warp, line);
  return set + static_cast<size_t>(running_) / kWarp * kWarp * kSlot;
}

unsigned char* Block::shared(size_t offset, size_t bytes, size_t alignment) {
  if (offset % alignment != 0) fault("shared memory at " + std::to_string(offset) + " is not aligned");
  if (offset + bytes > shared_.size()) {
    fault("shared memory up to " + std::to_string(offset + bytes) + " of " + std::to_string(shared_.size()) + " bytes");
  }
  return shared_.data() + offset;
}

Moment Block::now() const { return {running_, block_epoch_, warp_epoch_[static_cast<size_t>(running_) / kWarp]}; }

bool Block::ordered(const Moment& before) const {
  if (before.thread < 0 || before.thread == running_ || before.block_epoch != block_epoch_) return true;
  const size_t warp = static_cast<size_t>(running_) / kWarp;
  return static_cast<size_t>(before.thread) / kWarp == warp && before.warp_epoch != warp_epoch_[warp];
}

Block::Shadow& Block::shadow(const void* where, size_t) {
  return shadows_[static_cast<size_t>(static_cast<const unsigned char*>(where) - shared_.data()) / kGranule];
}

void Block::reads(const void* where, size_t size) {
  for (size_t n = 0; n < size; n += kGranule) {
    Shadow& here = shadow(static_cast<const unsigned char*>(where) + n, size);
    if (!ordered(here.writer)) fault("race: read of shared memory that thread " + std::to_string(here.writer.thread) + " writes");
    const Moment moment = now();
    const bool again = here.reader.thread >= 0 && here.reader.block_epoch == moment.block_epoch;
    here.readers = again && (here.readers || here.reader.thread != running_);
    here.reader = moment;
  }
}

void Block::writes(const void* where, size_t size) {
  for (size_t n = 0; n < size; n += kGranule) {
    Shadow& here = shadow(static_cast<const unsigned char*>(where) + n, size);
    if (!ordered(here.writer)) fault("race: write of shared memory that thread " + std::to_string(here.writer.thread) + " writes");
    const bool others = here.readers && here.reader.block_epoch == block_epoch_ && here.reader.warp_epoch == now().warp_epoch;
    if (!ordered(here.reader) || others) {
      fault("race: write of shared memory that thread " + std::to_string(here.reader.thread) + " reads");
    }
    here.writer = now();
    here.readers = false;
  }
}

}  // namespace capsfast::emulator
