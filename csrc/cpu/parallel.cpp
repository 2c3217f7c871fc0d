#include "parallel.h"

#include <chrono>
#include <exception>

namespace capsfast {

namespace {

using Clock = std::chrono::steady_clock;

// How long a thread that waits looks for what it waits for before it sleeps. What follows within a call comes sooner.
// A thread that waits longer waits for one that the system does not run, and gives it its core.
constexpr std::chrono::microseconds kLook{100};
// How long a call waits for its helpers to leave. The parallel region waits after that, but does not sleep.
constexpr std::chrono::milliseconds kLeave{20};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Enter {
 public:
  explicit Enter(Team* team) : before_(standing()) { standing() = {true, team}; }
  ~Enter() { standing() = before_; }

 private:
  Standing before_;
};

}  // namespace

Standing& standing() {
  thread_local Standing here;
  return here;
}

int64_t num_threads() {
  const Team* team = standing().team;
  return team != nullptr ? team->members() : static_cast<int64_t>(torch::stable::get_num_threads());
}

// A part that is claimed belongs to the loop that runs: the next begins when all parts are done, this one too. So the
// loop is read after that, not before.
int64_t Team::claim() {
  int64_t parts = open_.load(std::memory_order_relaxed);
  while (parts > 0) {
    if (open_.compare_exchange_weak(parts, parts - 1, std::memory_order_acquire, std::memory_order_relaxed)) {
      return count_ - parts;
    }
  }
  return -1;
}

void Team::execute(int64_t index, int64_t member) {
  try {
    part_(loop_, index, member);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_ == nullptr) error_ = std::current_exception();
  }
  if (unfinished_.fetch_sub(1) == 1 && member != 0) wake();
}

// Whoever sleeps has said so before it looked a last time, and what it waits for is stored before this.
void Team::wake() {
  if (sleepers_.load() == 0) return;
  { const std::lock_guard<std::mutex> lock(mutex_); }
  changed_.notify_all();
}

template <class Ready>
void Team::wait(const Ready& ready, bool forever) {
  const Clock::time_point start = Clock::now();
  do {
    for (int n = 0; n < 64; ++n) {
      if (ready()) return;
      pause();
    }
  } while (Clock::now() - start < kLook);
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1);
  if (forever) {
    changed_.wait(lock, ready);
  } else {
    changed_.wait_for(lock, kLeave, ready);
  }
  sleepers_.fetch_sub(1);
}

void Team::share(int64_t count, Part part, const void* loop) {
  count_ = count;
  part_ = part;
  loop_ = loop;
  unfinished_.store(count, std::memory_order_relaxed);
  open_.store(count);
  wake();
  {
    const Enter enter(nullptr);
    for (int64_t index; (index = claim()) >= 0;) execute(index, 0);
  }
  wait([&] { return unfinished_.load() == 0; }, true);
  if (error_ == nullptr) return;
  std::exception_ptr error;
  error.swap(error_);
  std::rethrow_exception(error);
}

void Team::help(int64_t member) {
  // A thread pool without enough threads may run this on the caller's own, which would wait for itself.
  if (std::this_thread::get_id() == caller_) return;
  const Enter enter(nullptr);
  while (true) {
    for (int64_t index; (index = claim()) >= 0;) execute(index, member);
    if (open_.load() == kClosed) break;
    wait([&] { return open_.load() != 0; }, true);
  }
  left_.fetch_add(1);
  wake();
}

void Team::close(int64_t helpers) {
  open_.store(kClosed);
  wake();
  wait([&] { return left_.load() >= helpers; }, false);
}

void run_call(bool shared, void (*call)(const void*), const void* context) {
  if (standing().inside) return call(context);
  const int64_t threads = shared ? num_threads() : 1;
  if (threads <= 1) {
    const Enter enter(nullptr);
    return call(context);
  }
  Team team(threads);
  std::exception_ptr error;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    if (begin > 0) return team.help(begin);
    try {
      const Enter enter(&team);
      call(context);
    } catch (...) { error = std::current_exception(); }
    // Threads may be fewer than asked for: then each has several of the numbers. Within another parallel region there is
    // but the caller.
    team.close((threads - 1) / end);
  });
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace capsfast
