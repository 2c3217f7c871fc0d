#include "parallel.h"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#include <algorithm>
#include <chrono>
#include <exception>

namespace capsfast {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Within a call, a wait takes microseconds. If it takes longer, there are more threads than free cores, and the waiting
// thread yields its core.
template <class Ready>
void wait_for(const Ready& ready) {
  for (int n = 0; !ready(); ++n) {
    if (n < 4096) {
      pause();
    } else {
      std::this_thread::yield();
    }
  }
}

class Enter {
 public:
  explicit Enter(Team* team) : before_(standing()) { standing() = {true, team}; }
  ~Enter() { standing() = before_; }

 private:
  Standing before_;
};

// Decides whether the calls of one thread use helpers. Helpers do not pay if the call waits for them longer than they
// work, for example because another program keeps a core busy. Both times are fading sums over a few calls, so one
// interruption does not decide. A call without helpers cannot tell when they would pay again. So helpers are tried
// again after some calls, and after more calls each time they fail.
class Help {
 public:
  bool wanted() { return without_ == 0 || --without_ == 0; }
  void record(double waited, double helped) {
    waited_ = kFade * waited_ + waited;
    helped_ = kFade * helped_ + helped;
    ++calls_;
    if (waited_ <= helped_) {
      pause_ = kFewest;
      return;
    }
    if (calls_ < kTried) return;
    without_ = pause_;
    pause_ = std::min(2 * pause_, kMost);
    waited_ = helped_ = 0;
    calls_ = 0;
  }

 private:
  static constexpr double kFade = 0.7;
  static constexpr int kTried = 3, kFewest = 8, kMost = 64;
  double waited_ = 0, helped_ = 0;
  int calls_ = 0, without_ = 0, pause_ = kFewest;
};

// A forked process has the memory of its parent, but only one of the parent's threads. If the parent had opened an
// OpenMP region, by a call or by an operation of torch, a region in the child would wait for the missing threads for
// ever. OpenMP does not tell whether it has threads, so no forked process opens a region. The flag is set from the time
// the library is loaded: a process that is forked earlier has threads.
std::atomic<bool> forked{false};

#if defined(__unix__) || defined(__APPLE__)
[[maybe_unused]] const int noted = pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif

}  // namespace

Standing& standing() {
  thread_local Standing here;
  return here;
}

int64_t num_threads() {
  const Team* team = standing().team;
  return team != nullptr ? team->members() : static_cast<int64_t>(torch::stable::get_num_threads());
}

// A claimed task belongs to the loop that runs now: the next loop begins only when all tasks are done, this one too. So
// a thread reads the fields of the loop after its claim, not before.
int64_t Team::claim(int64_t member) {
  int64_t tasks = open_.load(std::memory_order_relaxed);
  while (tasks > 0) {
    if (!open_.compare_exchange_weak(tasks, tasks - 1, std::memory_order_acquire, std::memory_order_relaxed)) continue;
    if (taken_ == nullptr) return count_ - tasks;
    // As many threads have come here as tasks are taken, so a task is left.
    for (int64_t task = count_ * member / members_;; task = task + 1 < count_ ? task + 1 : 0) {
      if (!taken_[task].exchange(true, std::memory_order_relaxed)) return task;
    }
  }
  return -1;
}

void Team::execute(int64_t index, int64_t member) {
  try {
    task_(loop_, index, member);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(failing_);
    if (error_ == nullptr) error_ = std::current_exception();
  }
  unfinished_.fetch_sub(1, std::memory_order_release);
}

void Team::share(int64_t count, bool by_member, Task task, const void* loop) {
  count_ = count;
  taken_.reset(by_member ? new std::atomic<bool>[static_cast<size_t>(count)]() : nullptr);
  task_ = task;
  loop_ = loop;
  unfinished_.store(count, std::memory_order_relaxed);
  open_.store(count, std::memory_order_release);
  {
    const Enter enter(nullptr);
    for (int64_t index; (index = claim(0)) >= 0;) execute(index, 0);
  }
  const Clock::time_point start = Clock::now();
  wait_for([&] { return unfinished_.load(std::memory_order_acquire) == 0; });
  waited_ += seconds_since(start);
  if (error_ == nullptr) return;
  std::exception_ptr error;
  error.swap(error_);
  std::rethrow_exception(error);
}

void Team::help(int64_t member) {
  // A thread pool might run this on the thread of the caller, which would then wait for itself.
  if (std::this_thread::get_id() == caller_) return;
  const Enter enter(nullptr);
  while (open_.load(std::memory_order_relaxed) != kClosed) {
    int64_t index = claim(member);
    if (index >= 0) {
      const Clock::time_point start = Clock::now();
      for (; index >= 0; index = claim(member)) execute(index, member);
      const auto worked = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start);
      helped_.fetch_add(worked.count(), std::memory_order_relaxed);
    }
    wait_for([&] { return open_.load(std::memory_order_relaxed) != 0; });
  }
}

int64_t region_threads() { return forked ? 1 : num_threads(); }

void run_call(bool shared, void (*call)(const void*), const void* context) {
  if (standing().inside) return call(context);
  thread_local Help help;
  const int64_t threads = shared ? region_threads() : 1;
  if (threads <= 1 || !help.wanted()) {
    const Enter enter(nullptr);
    return call(context);
  }
  Team team(threads);
  std::exception_ptr error;
  const Clock::time_point start = Clock::now();
  double called = 0, returned = 0;
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t) {
    // There may be fewer threads than asked for: inside another parallel region there is only the caller.
    if (begin > 0) return team.help(begin);
    called = seconds_since(start);
    try {
      const Enter enter(&team);
      call(context);
    } catch (...) { error = std::current_exception(); }
    team.close();
    returned = seconds_since(start);
  });
  const double total = seconds_since(start);
  help.record(called + team.waited() + total - returned, team.helped());
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace capsfast
