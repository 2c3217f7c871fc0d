#include "block.h"

#include <algorithm>
#include <cstring>

namespace capsfast::emulator {

Block* Block::running = nullptr;

void fault(const std::string& what) {
  if (Block::running == nullptr) throw Fault(what);
  const int thread = Block::running->thread();
  throw Fault(what + " [block " + to_string(Block::running->place().index) +
              (thread < 0 ? "" : ", thread " + std::to_string(thread)) + "]");
}

void Block::no_launch() { fault("device code outside of a launch"); }

void Block::check_early(const void* where, size_t bytes) {
  if (Machine::current().call.in_scratch(where, bytes))
    fault("a thread touches scratch memory before it waited for the launch before");
}

void Block::begin(const Place& place, size_t threads, size_t shared_bytes, const std::function<void()>& body,
                  const std::unique_ptr<Block>* neighbours) {
  place_ = place;
  count_ = threads;
  body_ = &body;
  neighbours_ = neighbours;
  failure_ = nullptr;
  left_ = false;
  while (states_.size() < threads) states_.push_back(std::make_unique<State>());
  slots_.resize(2 * kSlot * threads);
  named_.fill({});
  memory_.begin(shared_bytes, threads);
  arrivals_.clear();
  for (const auto& state : states_) state->released = memory_.epoch() - 1;  // what earlier launches have left
  for (size_t n = 0; n < threads; ++n) {
    states_[n]->wait = Wait::none;
    states_[n]->exchanges = 0;
    states_[n]->groups = 0;
    states_[n]->waited = false;
    states_[n]->ahead.clear();
    states_[n]->fiber.start(&Block::entry, this);
  }
}

// This and the next function are inlined because a processor mispredicts every return that follows a switch of stacks.
[[gnu::always_inline]] inline void Block::suspend(Wait wait, int line) {
  State& mine = state();
  mine.wait = wait;
  mine.line = line;
  mine.fiber.suspend();
}

[[gnu::always_inline]] inline void Block::run_thread(size_t thread) {
  thread_ = static_cast<int>(thread);
  running = this;
  states_[thread]->fiber.resume();
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

void Block::run(bool backwards) {
  do {
    for (size_t n = 0; n < count_; ++n) {
      const size_t thread = backwards ? count_ - 1 - n : n;
      if (states_[thread]->wait == Wait::none) run_thread(thread);
    }
  } while (release());
  if (!left_ && waits_at(Wait::done) != 0) leave();
}

void Block::entry(void* self) {
  Block& block = *static_cast<Block*>(self);
  try {
    (*block.body_)();
    if (block.too_early()) fault("a kernel that starts early leaves without waiting for the launch before");
  } catch (...) { block.failure_ = std::current_exception(); }
  block.suspend(Wait::done, 1);
}

void Block::leave() {
  left_ = true;
  for (size_t n = 0; n < count_; ++n) {
    if (!states_[n]->ahead.empty()) fault("a block leaves with a copy that was not waited for");
  }
  for (const auto& [offset, arrival] : arrivals_) {
    if (!arrival.copies.empty()) fault("a block leaves with a copy that was not waited for");
  }
  if (memory_.read_by_others())
    fault("block " + std::to_string(place_.rank) + " of the cluster leaves while another may read its shared memory");
}

int Block::waits_at(Wait wait) const {
  const int line = states_[0]->line;
  for (size_t n = 0; n < count_; ++n) {
    if (states_[n]->wait != wait || states_[n]->line != line) return 0;
  }
  return line;
}

void Block::go_on() {
  running = this;
  thread_ = -1;
  memory_.cluster_barrier();
  for (size_t n = 0; n < count_; ++n) states_[n]->wait = Wait::none;
}

bool Block::release_together(size_t first, size_t count, Wait wait) {
  for (size_t n = first; n < first + count; ++n) {
    if (states_[n]->wait != wait || states_[n]->line != states_[first]->line) return false;
  }
  for (size_t n = first; n < first + count; ++n) states_[n]->wait = Wait::none;
  return true;
}

// Releases the warps that wait at this barrier if they are all that it is for, with all their lanes.
bool Block::release_named(size_t id) {
  Named& named = named_[id];
  if (named.waiting == 0 || named.waiting != named.count) return false;
  const auto waits = [&](size_t n) {
    return states_[n]->wait == Wait::named && states_[n]->named == static_cast<int>(id);
  };
  std::vector<size_t> warps;
  for (size_t first = 0; first < count_; first += kWarp) {
    if (!waits(first)) continue;
    for (size_t n = first; n < first + kWarp; ++n) {
      if (!waits(n) || states_[n]->line != states_[first]->line) return false;
    }
    warps.push_back(first / kWarp);
  }
  if (warps.size() * kWarp != static_cast<size_t>(named.count)) return false;
  for (const size_t warp : warps) {
    for (size_t n = warp * kWarp; n < (warp + 1) * kWarp; ++n) states_[n]->wait = Wait::none;
  }
  // A warp that knows this moment knows that the barrier has ended, because the clocks go on with it.
  named.last = memory_.now(static_cast<int>(warps[0]) * kWarp);
  memory_.named_barrier(warps);
  named.waiting = 0;
  return true;
}

// Releases threads that wait for each other: all lanes of a warp at the same exchange, the warps of a named barrier, or
// all threads of the block at the same barrier. Returns whether it released any.
bool Block::release() {
  thread_ = -1;
  bool any = false;
  for (size_t warp = 0; warp < count_ / kWarp; ++warp) {
    if (release_together(warp * kWarp, kWarp, Wait::warp)) {
      any = true;
    } else if (release_together(warp * kWarp, kWarp, Wait::warp_barrier)) {
      memory_.warp_barrier(warp);
      any = true;
    }
  }
  for (size_t id = 1; id < kNamed; ++id) any |= release_named(id);
  if (any) return true;
  if (!release_together(0, count_, Wait::barrier)) return false;
  memory_.barrier();
  return true;
}

std::string Block::whereabouts(int most) const {
  static const char* const names[] = {
      "runs",
      "at the barrier",
      "at the barrier of the cluster",
      "at the barrier of the grid",
      "in the exchange of its warp",
      "at the barrier of its warp",
      "at named barrier",
      "has left the kernel"};
  std::string what;
  const State* before = nullptr;
  int told = 0;
  for (size_t n = 0; n < count_ && told < most; ++n) {
    const State& state = *states_[n];
    const bool named = state.wait == Wait::named;
    if (before != nullptr && before->wait == state.wait && before->line == state.line &&
        (!named || before->named == state.named))
      continue;
    what += (told++ ? "; thread " : " thread ") + std::to_string(n) + " " + names[static_cast<int>(state.wait)];
    if (named) what += " " + std::to_string(state.named);
    if (state.wait != Wait::done) what += " of line " + std::to_string(state.line);
    before = &state;
  }
  return what;
}

void Block::barrier(int line) { suspend(Wait::barrier, line); }

void Block::cluster_barrier(int line) { suspend(Wait::cluster, line); }

void Block::grid_barrier(int line) {
  if (!place_.cooperative) fault("a barrier of the grid in a launch that is not cooperative");
  suspend(Wait::grid, line);
}

void Block::warp_barrier(int line) { suspend(Wait::warp_barrier, line); }

void Block::named_barrier(int id, int count, int line) {
  const auto wrong = [&](const std::string& what) { fault("named barrier " + std::to_string(id) + what); };
  if (id < 1 || static_cast<size_t>(id) >= kNamed) wrong(": 1 to 15 are possible");
  if (count <= 0 || count % kWarp != 0 || count > threads())
    wrong(" of " + std::to_string(count) + " threads: not whole warps of a block of " + std::to_string(threads()));
  Named& named = named_[static_cast<size_t>(id)];
  // On a GPU this thread may come earlier, while the last use still waits for others.
  if (!memory_.ordered(named.last, now())) wrong(": a thread comes that does not know that the last use has ended");
  if (named.waiting == 0) named.count = count;
  if (named.count != count) wrong(" of " + std::to_string(count) + " threads and of " + std::to_string(named.count));
  if (named.waiting == count) wrong(" of " + std::to_string(count) + " threads: more come");
  ++named.waiting;
  state().named = id;
  suspend(Wait::named, line);
}

const unsigned char* Block::exchange(const void* value, size_t size, int line) {
  // Two sets of slots take turns, so that no lane writes to the set that others still read.
  unsigned char* set = slots_.data() + (state().exchanges++ % 2 == 0 ? 0 : slots_.size() / 2);
  std::memcpy(set + static_cast<size_t>(thread_) * kSlot, value, size);
  suspend(Wait::warp, line);
  return set + static_cast<size_t>(thread_) / kWarp * kWarp * kSlot;
}

void Block::read_from(int rank, const void* where, size_t size, void* to) {
  if (rank < 0 || rank >= place_.cluster)
    fault("block " + std::to_string(rank) + " of a cluster of " + std::to_string(place_.cluster));
  if (rank == place_.rank) {
    reads(where, size);
    std::memcpy(to, where, size);
    return;
  }
  Block& owner = *neighbours_[rank];
  if (owner.left_)
    fault("block " + std::to_string(rank) + " of the cluster leaves while another may read its shared memory");
  const unsigned char* there = owner.memory_.at(memory_.offset(where), size, 1);
  owner.memory_.read_remotely(there, size, place_.rank);
  std::memcpy(to, there, size);
}

// Until the thread has waited, a GPU may write the bytes at any time, so no thread may access them. Afterwards they
// count as written by this thread.
void Block::copy_ahead(unsigned char* to, const unsigned char* from) {
  constexpr size_t kBytes = sizeof(Ahead::bytes);
  if (memory_.offset(to) % kBytes != 0 || reinterpret_cast<uintptr_t>(from) % kBytes != 0)
    fault("a copy that is not aligned to 16 bytes");
  Ahead copy{to, from, {}, memory_.expect(to, kBytes, now()), state().groups};
  std::memcpy(copy.bytes, from, kBytes);
  state().ahead.push_back(copy);
}

void Block::copies_wait(uint32_t later) {
  std::vector<Ahead>& ahead = state().ahead;
  const auto arrives = [&](const Ahead& copy) { return later == 0 || copy.group + later < state().groups; };
  for (const Ahead& copy : ahead) {
    if (!arrives(copy)) continue;
    if (std::memcmp(copy.from, copy.bytes, sizeof(copy.bytes)) != 0) fault("the source of a copy changes on its way");
    memory_.arrives(copy.name);
    writes(copy.to, sizeof(copy.bytes));
    std::memcpy(copy.to, copy.bytes, sizeof(copy.bytes));
  }
  ahead.erase(std::remove_if(ahead.begin(), ahead.end(), arrives), ahead.end());
}

void Block::arrival_begin(size_t offset) {
  memory_.at(offset, 8, 8);
  if (!arrivals_.try_emplace(offset, Arrival{memory_.epoch(), 0, 0, 0, {}}).second) fault("an Arrival begins twice");
}

void Block::arrival_end(size_t offset) {
  if (!arrival(offset).copies.empty()) fault("an Arrival ends with a copy that was not waited for");
  arrivals_.erase(offset);
}

Block::Arrival& Block::arrival(size_t offset) {
  const auto found = arrivals_.find(offset);
  if (found == arrivals_.end()) fault("an Arrival that has not begun");
  if (found->second.begun == memory_.epoch()) fault("an Arrival that begins without a barrier before its use");
  return found->second;
}

void Block::arrival_expect(size_t offset, size_t bytes) {
  Arrival& here = arrival(offset);
  if (here.expected != 0) fault("an Arrival that expects copies twice");
  here.expected = bytes;
}

void Block::arrival_copy(size_t offset, unsigned char* to, const unsigned char* from, size_t bytes) {
  Arrival& here = arrival(offset);
  if (memory_.offset(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0)
    fault("a copy that is not aligned to 16 bytes");
  const auto released = [&](const Moment& writer) {
    return writer.thread < 0 || states_[static_cast<size_t>(writer.thread)]->released >= writer.epoch;
  };
  memory_.check_writers(to, bytes, released);
  here.copies.push_back({to, from, {from, from + bytes}, memory_.expect(to, bytes, now())});
  here.on_the_way += bytes;
}

void Block::arrival_wait(size_t offset, bool odd) {
  Arrival& here = arrival(offset);
  if ((here.uses % 2 == 1) != odd) return;  // that use is over
  if (here.expected == 0 || here.expected != here.on_the_way) fault("a thread waits for copies that do not arrive");
  for (const Bulk& copy : here.copies) {
    if (std::memcmp(copy.from, copy.bytes.data(), copy.bytes.size()) != 0)
      fault("the source of a copy changes on its way");
    memory_.arrives(copy.name);
    memory_.forget_writers(copy.to, copy.bytes.size());
    std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  }
  here.copies.clear();
  here.expected = here.on_the_way = 0;
  ++here.uses;
}

}  // namespace capsfast::emulator
