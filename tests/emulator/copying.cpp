#include "copying.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace capsfast::emulator {

namespace {

std::string number(int n) { return "stage " + std::to_string(n); }

}  // namespace

void Copying::begin(int threads) {
  sets_.clear();
  made_.assign(static_cast<size_t>(threads), 0);
}

size_t Copying::make(size_t offset, int stages, const Moment& now) {
  const size_t set = made_[static_cast<size_t>(now.thread)]++;
  if (set < sets_.size()) {
    if (sets_[set].offset != offset || sets_[set].stages != stages) fault("threads make different Copies");
    return set;
  }
  // The kernel must not touch the memory of Copies itself: an arrival that no thread ever sees makes that a fault.
  const size_t bytes = 8 * static_cast<size_t>(stages);
  memory_.expect(memory_.at(offset, bytes, 8), bytes, now, now.epoch, "other Copies");
  sets_.push_back(
      {offset, stages, now.epoch, std::vector<int>(made_.size(), 0), std::vector<int>(made_.size(), 0), {}});
  return set;
}

const Copying::Set& Copying::set_of(const Stage& stage) const {
  const Set& set = sets_[stage.set];
  if (stage.number < 0 || stage.number >= set.stages)
    fault(number(stage.number) + " of copies with " + std::to_string(set.stages));
  return set;
}

void Copying::start(const Stage& stage, unsigned char* to, const unsigned char* from, size_t size, const Moment& now) {
  set_of(stage);
  Set& set = sets_[stage.set];
  int& mine = set.started[static_cast<size_t>(now.thread)];
  if (stage.number < mine) fault("a copy starts " + number(stage.number) + " twice");
  if (stage.number > mine) fault("a copy starts " + number(stage.number) + " before " + number(mine));
  ++mine;
  if (static_cast<size_t>(stage.number) < set.flights.size()) {
    const Flight& flight = set.flights[static_cast<size_t>(stage.number)];
    if (flight.to != to || flight.from != from || flight.size != size)
      fault("threads start different copies as " + number(stage.number));
    return;
  }
  if (size > 0 && (memory_.offset(to) % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || size % 16 != 0)) {
    fault("a copy that is not aligned to 16 bytes: " + std::to_string(size) + " bytes to " +
          std::to_string(memory_.offset(to)));
  }
  Flight flight{to, from, size, {from, from + size}, 0, false};
  // Even after a barrier, a write to the target since the set was made is a fault. A GPU may start the copy at once, so
  // that the write would come after its bytes.
  flight.name = memory_.expect(to, size, now, set.epoch, "a copy that was not waited for");
  set.flights.push_back(std::move(flight));
}

bool Copying::started(const Stage& stage) const {
  const std::vector<int>& started = sets_[stage.set].started;
  return std::all_of(started.begin(), started.end(), [&](int n) { return n > stage.number; });
}

void Copying::check_wait(const Stage& stage, int thread) const {
  const Set& set = set_of(stage);
  const int started = set.started[static_cast<size_t>(thread)], waited = set.waited[static_cast<size_t>(thread)];
  if (started <= stage.number) fault("a wait for " + number(stage.number) + ", which was not started");
  if (started < set.stages) fault("a wait before " + number(started) + " was started");
  if (stage.number != waited) fault("a wait for " + number(stage.number) + " where " + number(waited) + " comes next");
}

void Copying::arrive(const Stage& stage, int thread) {
  Set& set = sets_[stage.set];
  Flight& flight = set.flights[static_cast<size_t>(stage.number)];
  ++set.waited[static_cast<size_t>(thread)];
  if (!flight.arrived && flight.size > 0) {
    if (std::memcmp(flight.from, flight.bytes.data(), flight.size) != 0)
      fault("the source of a copy changes on its way");
    std::memcpy(flight.to, flight.bytes.data(), flight.size);
  }
  flight.arrived = true;
  memory_.seen(flight.name, thread);
}

void Copying::check_even() const {
  const auto check = [](const std::vector<int>& stages, const char* what) {
    const auto other = std::find_if(stages.begin(), stages.end(), [&](int n) { return n != stages.front(); });
    if (other == stages.end()) return;
    fault("threads of a block have " + std::string(what) + " different copies: thread 0 " +
          std::to_string(stages.front()) + ", thread " + std::to_string(other - stages.begin()) + " " +
          std::to_string(*other));
  };
  for (const Set& set : sets_) {
    check(set.started, "started");
    check(set.waited, "waited for");
  }
}

void Copying::check_end() const {
  check_even();
  for (const Set& set : sets_) {
    for (const Flight& flight : set.flights) {
      if (!flight.arrived && flight.size > 0) fault("a block leaves with a copy that was not waited for");
    }
  }
}

}  // namespace capsfast::emulator
