// How a call shares its work among threads.
//
// Uses torch's own thread pool through the stable ABI, so that torch.set_num_threads holds here too. A call opens one
// parallel region: the thread that came with the call runs it, the others help with the loops it comes to. A loop waits
// for those that took a part of it and for no one else: a thread that the system does not run, as something else is
// busy on its core, would hold up all at the end of every loop. Only beginning and end of the region wait for all. A
// thread whose calls spend their time with waiting does without help for a while.
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
  // What a loop does with one of its parts.
  using Part = void (*)(const void* loop, int64_t part, int64_t member);

  explicit Team(int64_t members) : members_(members), caller_(std::this_thread::get_id()) {}
  int64_t members() const { return members_; }

  // Member 0: has parts [0, count) of a loop done, by whoever is there. They are handed out one at a time, in order. An
  // exception of a part is thrown here, when the others are done. If `own`, not in order: member m begins with its own
  // share of the parts, the m-th, so that loops over the same data find it in the cache of the same core; then it helps
  // with others.
  void share(int64_t count, bool own, Part part, const void* loop);
  // A helper: does parts of loops until the team closes.
  void help(int64_t member);
  // Member 0: no more loops.
  void close() { open_.store(kClosed, std::memory_order_release); }
  // How long member 0 has waited for others, in seconds.
  double waited() const { return waited_; }
  // How long helpers have worked, in seconds.
  double helped() const { return 1e-9 * double(helped_.load(std::memory_order_relaxed)); }

 private:
  static constexpr int64_t kClosed = -1;

  int64_t claim(int64_t member);
  void execute(int64_t index, int64_t member);

  const int64_t members_;
  const std::thread::id caller_;
  // The loop. Written before `open_` is, when nobody has a part of the one before; read by those who claimed a part.
  int64_t count_ = 0;
  std::unique_ptr<std::atomic<bool>[]> taken_;  // of every part, if members have their own
  Part part_ = nullptr;
  const void* loop_ = nullptr;
  double waited_ = 0;
  std::mutex failing_;
  std::exception_ptr error_;                  // of the loop; failing_ guards it while parts run
  alignas(64) std::atomic<int64_t> open_{0};  // parts that are not claimed yet; kClosed at the end
  alignas(64) std::atomic<int64_t> unfinished_{0};
  alignas(64) std::atomic<int64_t> helped_{0};  // nanoseconds
};

// Where a thread stands: in a call that it runs, with its team, or within a part of a loop, or in a call that is not
// shared: both without a team.
struct Standing {
  bool inside = false;
  Team* team = nullptr;
};
Standing& standing();

// How many threads the call may use, and so into how many parts it is worth cutting.
int64_t num_threads();

// How many threads may do parts of a loop.
inline int64_t members() { return standing().team == nullptr ? 1 : standing().team->members(); }

// Runs call(loop) with a team, or if it is not worth sharing without one.
void run_call(bool shared, void (*call)(const void*), const void* context);

// Runs f(): a call, whose loops are shared if that pays.
template <class F>
void with_team(bool shared, const F& f) {
  run_call(shared, [](const void* context) { (*static_cast<const F*>(context))(); }, &f);
}

// Calls f(task, member) for tasks [0, count), on members of [0, members()), each of which has one task at a time.
// `own`: see Team::share().
template <class F>
void for_tasks(int64_t count, const F& f, bool own = false) {
  if (standing().team != nullptr && count > 1) {
    const Team::Part part = [](const void* loop, int64_t index, int64_t member) {
      (*static_cast<const F*>(loop))(index, member);
    };
    return standing().team->share(count, own, part, &f);
  }
  for (int64_t task = 0; task < count; ++task) f(task, int64_t{0});
}

// Calls f(begin, end) on parts of [0, count) of at least `grain` elements, but for the last.
template <class F>
void parallel(int64_t count, int64_t grain, const F& f) {
  if (count <= 0) return;
  if (standing().team == nullptr) return f(int64_t{0}, count);
  // More parts than threads, so that one that is late leaves them to others.
  const int64_t parts = std::min((count + grain - 1) / grain, 4 * num_threads());
  for_tasks(parts, [&](int64_t part, int64_t) { f(count * part / parts, count * (part + 1) / parts); });
}

}  // namespace capsfast
