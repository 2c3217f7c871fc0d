// How a call shares its work among threads.
//
// Uses torch's own thread pool through the stable ABI, so torch.set_num_threads holds here too. A call opens one
// parallel region. The calling thread runs the call; the other threads help with its loops. A loop waits only for the
// threads that took a task of it. If it waited for all, a thread that the system does not run, because another program
// keeps its core busy, would hold up every loop. Only the beginning and the end of the region wait for all threads. If
// calls of a thread spend their time waiting, its next calls do without helpers for a while.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace capsfast {

// The threads of one call: member 0, which runs the call, and helpers.
class Team {
 public:
  using Task = void (*)(const void* loop, int64_t task, int64_t member);

  explicit Team(int64_t members) : members_(members), caller_(std::this_thread::get_id()) {}
  int64_t members() const { return members_; }

  // Member 0: runs tasks [0, count) of a loop on all members. Tasks are handed out one at a time, in order. If a task
  // throws, this function throws the exception when the other tasks are done. If `by_member`, tasks are not in order:
  // member m begins with the m-th share of the tasks, so that loops over the same data find the data in the cache of
  // the same core. Then it helps with other shares.
  void share(int64_t count, bool by_member, Task task, const void* loop);
  // A helper: does tasks of loops until the team closes.
  void help(int64_t member);
  void close() { open_.store(kClosed, std::memory_order_release); }  // member 0: no more loops
  double waited() const { return waited_; }                          // seconds that member 0 waited for others
  double helped() const { return 1e-9 * double(helped_.load(std::memory_order_relaxed)); }  // seconds of work

 private:
  static constexpr int64_t kClosed = -1;

  int64_t claim(int64_t member);
  void execute(int64_t index, int64_t member);

  const int64_t members_;
  const std::thread::id caller_;
  // The loop. Written before `open_`, when no thread has a task of the loop before. Only threads that claimed a task
  // read it.
  int64_t count_ = 0;
  std::unique_ptr<std::atomic<bool>[]> taken_;  // of every task, if members have a share each
  Task task_ = nullptr;
  const void* loop_ = nullptr;
  double waited_ = 0;
  std::mutex failing_;
  std::exception_ptr error_;                  // of the loop; failing_ guards it while tasks run
  alignas(64) std::atomic<int64_t> open_{0};  // tasks that are not claimed yet; kClosed at the end
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<int64_t> helped_{0};  // nanoseconds
};

// Where a thread stands. If it runs a shared call it has a team. Inside a task of a loop, or in a call that is not
// shared, it has none.
struct Standing {
  bool inside = false;
  Team* team = nullptr;
};
Standing& standing();

// How many threads the call may use.
int64_t num_threads();

// How many threads a parallel region may have: 1 in a forked process. Tasks of a call do not depend on it, so a forked
// process has the results of its parent.
int64_t region_threads();

// How many threads may do tasks of a loop.
inline int64_t members() { return standing().team == nullptr ? 1 : standing().team->members(); }

// Runs call(context): with a team if `shared` and helpers pay, else without.
void run_call(bool shared, void (*call)(const void*), const void* context);

// The same for a function object f().
template <class F>
void with_team(bool shared, const F& f) {
  run_call(shared, [](const void* context) { (*static_cast<const F*>(context))(); }, &f);
}

// Calls f(task, member) for tasks [0, count), on members of [0, members()), each of which has one task at a time.
// `by_member`: see Team::share().
template <class F>
void for_tasks(int64_t count, const F& f, bool by_member = false) {
  if (standing().team != nullptr && count > 1) {
    const Team::Task task = [](const void* loop, int64_t index, int64_t member) {
      (*static_cast<const F*>(loop))(index, member);
    };
    return standing().team->share(count, by_member, task, &f);
  }
  for (int64_t task = 0; task < count; ++task) f(task, int64_t{0});
}

// Calls f(begin, end) on equal tasks of [0, count). Several tasks have at least half of `grain` elements each.
template <class F>
void parallel(int64_t count, int64_t grain, const F& f) {
  if (count <= 0) return;
  if (standing().team == nullptr) return f(int64_t{0}, count);
  // More tasks than threads, so that a late thread leaves tasks to the others.
  const int64_t tasks = std::min((count + grain - 1) / grain, 4 * num_threads());
  for_tasks(tasks, [&](int64_t task, int64_t) { f(count * task / tasks, count * (task + 1) / tasks); });
}

}  // namespace capsfast
