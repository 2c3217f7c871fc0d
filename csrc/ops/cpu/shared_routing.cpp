#include "shared_routing.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "context.h"

namespace capsfast {

namespace {

using namespace driver;

// S and its transpose, as the kernels read them.
template <class T>
class Matrices {
 public:
  Matrices(const SharedProblem& p, SharedCall<T>* call)
      : S_(p.K == call->Kp ? 0 : p.D * call->Kp), St_(p.K * call->Dp) {
    const T* const weight = static_cast<const T*>(p.weight.data);
    call->S = p.K == call->Kp ? weight : S_.get(), call->St = St_.get();
    if (p.K != call->Kp) {
      for (int64_t d = 0; d < p.D; ++d) {
        T* const row = S_.get() + d * call->Kp;
        std::fill(std::copy_n(weight + d * p.K, p.K, row), row + call->Kp, T(0));
      }
    }
    // Squares of a cache line: a column of a large matrix would take a line for every number.
    constexpr int64_t kSide = 64 / sizeof(T);
    parallel(p.K, std::max<int64_t>(kSide, (1 << 16) / call->Dp), [&](int64_t begin, int64_t end) {
      for (int64_t k0 = begin; k0 < end; k0 += kSide) {
        const int64_t k1 = std::min(k0 + kSide, end);
        for (int64_t d0 = 0; d0 < p.D; d0 += kSide) {
          const int64_t d1 = std::min(d0 + kSide, p.D);
          for (int64_t k = k0; k < k1; ++k) {
            for (int64_t d = d0; d < d1; ++d) St_.get()[k * call->Dp + d] = weight[d * p.K + k];
          }
        }
        for (int64_t k = k0; k < k1; ++k) std::fill_n(St_.get() + k * call->Dp + p.D, call->Dp - p.D, T(0));
      }
    });
  }

 private:
  Buffer<T> S_, St_;
};

// Whether what is written to an array, by whole vectors, goes past the cache. From half of a last cache of 32 MiB on, where
// it was measured: what is read beside it takes the other half.
template <class T>
bool past_cache(const SharedCall<T>& call, const void* array, int64_t size) {
  constexpr int64_t kCaches = int64_t{1} << 24;
  const auto vector = static_cast<uintptr_t>(call.L) * sizeof(T);
  return size * static_cast<int64_t>(sizeof(T)) >= kCaches && reinterpret_cast<uintptr_t>(array) % vector == 0;
}

// Cuts the samples among tasks, at ends of blocks, and calls f(task, begin, end, memory, index).
template <class T, class F>
void for_samples(const SharedCall<T>& call, int64_t tasks, bool backward, const F& f) {
  const int64_t B = call.problem->B, blocks = (B + call.samples - 1) / call.samples;
  const int64_t size = SharedScratch<T>(call, nullptr, backward).size;
  const int64_t indices = call.samples * (call.problem->I + 1);
  // Of every thread, not of every task: the system hands out memory page by page.
  const Buffer<T> memory(members() * size);
  const Buffer<int64_t> index(members() * indices);
  for_tasks(tasks, [&](int64_t task, int64_t member) {
    T* const own = memory.get() + member * size;
    if (poisoned()) std::fill_n(own, size, std::numeric_limits<T>::quiet_NaN());  // not what another task left
    const int64_t begin = blocks * task / tasks * call.samples, end = blocks * (task + 1) / tasks * call.samples;
    f(task, begin, std::min(end, B), own, index.get() + member * indices);
  });
}

// Enough for all threads, and that the sums of a task are short.
template <class T>
int64_t tasks_of(const SharedCall<T>& call) {
  const int64_t B = call.problem->B, blocks = (B + call.samples - 1) / call.samples;
  return std::min(blocks, std::max<int64_t>(4 * num_threads(), std::min<int64_t>(64, B / 256)));
}

}  // namespace

template <class T>
void shared_forward(const SharedProblem& p, const SharedOutputs& out) {
  const Kernels<T>& table = kernels<T>(isa());
  SharedCall<T> call(p, table.L);
  const Matrices<T> matrices(p, &call);
  call.v = static_cast<T*>(out.v), call.kept = static_cast<T*>(out.kept);
  call.past_cache = p.K == call.Kp && (!p.keep_all || p.D == call.Dp) && past_cache(call, out.kept, p.B * p.kept());
  for_samples(call, tasks_of(call), false, [&](int64_t, int64_t begin, int64_t end, T* memory, int64_t* index) {
    table.shared_forward(call, begin, end, memory, index);
  });
}

template <class T>
void shared_backward(const SharedProblem& p, const T* dv, const T* kept, const SharedGradients& out) {
  const Kernels<T>& table = kernels<T>(isa());
  SharedCall<T> call(p, table.L);
  const Matrices<T> matrices(p, &call);
  call.dv = dv, call.saved = kept, call.du = static_cast<T*>(out.du);
  call.past_cache = call.in_place && past_cache(call, out.du, p.B * p.I * p.K);
  call.need_weight = out.dweight != nullptr, call.need_logits = out.dlogits.data != nullptr;
  if (call.need_logits && out.per_sample_logits) call.dlogits = static_cast<T*>(out.dlogits.data);
  const int64_t tasks = tasks_of(call), matrix = call.need_weight ? p.D * call.Kp : 0;
  const int64_t logits = call.need_logits && !out.per_sample_logits ? p.I * p.J : 0;
  const Buffer<T> sums(tasks * matrix);
  const Buffer<double> dlogits(tasks * logits);
  std::fill_n(sums.get(), tasks * matrix, T(0));
  std::fill_n(dlogits.get(), tasks * logits, 0.0);
  for_samples(call, tasks, true, [&](int64_t task, int64_t begin, int64_t end, T* memory, int64_t* index) {
    table.shared_backward(call, begin, end, memory, index, {sums.get() + task * matrix, dlogits.get() + task * logits});
  });
  add_up<double>(dlogits.get(), logits == 0 ? 0 : tasks, logits, out.dlogits);
  if (!call.need_weight) return;
  parallel(p.D, std::max<int64_t>(1, (1 << 16) / call.Kp), [&](int64_t begin, int64_t end) {
    for (int64_t d = begin; d < end; ++d) {
      T* const row = static_cast<T*>(out.dweight) + d * p.K;
      for (int64_t k = 0; k < p.K; ++k) {
        double total = 0;
        for (int64_t task = 0; task < tasks; ++task)
          total += static_cast<double>(sums.get()[task * matrix + d * call.Kp + k]);
        row[k] = static_cast<T>(total);
      }
    }
  });
}

template void shared_forward<float>(const SharedProblem&, const SharedOutputs&);
template void shared_forward<double>(const SharedProblem&, const SharedOutputs&);
template void shared_backward<float>(const SharedProblem&, const float*, const float*, const SharedGradients&);
template void shared_backward<double>(const SharedProblem&, const double*, const double*, const SharedGradients&);

}  // namespace capsfast
