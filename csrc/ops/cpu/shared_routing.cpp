#include "shared_routing.h"

#include <algorithm>
#include <cstdint>

#include "context.h"

namespace capsfast {

namespace {

using namespace driver;

// S, its transpose and S^T S, as the kernels read them.
template <class T>
class Matrices {
 public:
  Matrices(const SharedProblem& p, SharedCall<T>* call) : S_(p.D * call->Kp), St_(p.K * call->Dp), G_(p.K * call->Kp) {
    std::fill_n(S_.get(), p.D * call->Kp, T(0));
    std::fill_n(St_.get(), p.K * call->Dp, T(0));
    std::fill_n(G_.get(), p.K * call->Kp, T(0));
    const T* weight = static_cast<const T*>(p.weight.data);
    for (int64_t d = 0; d < p.D; ++d) {
      for (int64_t k = 0; k < p.K; ++k) {
        S_.get()[d * call->Kp + k] = St_.get()[k * call->Dp + d] = weight[d * p.K + k];
      }
    }
    parallel(p.K, 16, [&](int64_t begin, int64_t end) {
      for (int64_t d = 0; d < p.D; ++d) {
        for (int64_t k = begin; k < end; ++k)
          add_scaled(weight[d * p.K + k], S_.get() + d * call->Kp, p.K, k, call->Kp);
      }
    });
    call->S = S_.get(), call->St = St_.get(), call->G = G_.get();
  }

 private:
  void add_scaled(T factor, const T* row, int64_t size, int64_t k, int64_t Kp) {
    T* const to = G_.get() + k * Kp;
    for (int64_t n = 0; n < size; ++n) to[n] += factor * row[n];
  }

  Buffer<T> S_, St_, G_;
};

// Cuts the samples among tasks, at ends of blocks, and calls f(task, begin, end, memory, index).
template <class T, class F>
void for_samples(const SharedCall<T>& call, int64_t tasks, const F& f) {
  const int64_t B = call.problem->B, blocks = (B + call.samples - 1) / call.samples;
  const int64_t size = SharedScratch<T>(call, nullptr).size;
  for_tasks(tasks, [&](int64_t task, int64_t) {
    const Buffer<T> memory(size);
    const Buffer<int64_t> index(call.samples * (call.problem->I + 1));
    const int64_t begin = blocks * task / tasks * call.samples, end = blocks * (task + 1) / tasks * call.samples;
    f(task, begin, std::min(end, B), memory.get(), index.get());
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
  for_samples(call, tasks_of(call), [&](int64_t, int64_t begin, int64_t end, T* memory, int64_t* index) {
    table.shared_forward(call, begin, end, memory, index);
  });
}

template <class T>
void shared_backward(const SharedProblem& p, const T* dv, const T* kept, const SharedGradients& out) {
  const Kernels<T>& table = kernels<T>(isa());
  SharedCall<T> call(p, table.L);
  const Matrices<T> matrices(p, &call);
  call.dv = dv, call.saved = kept, call.du = static_cast<T*>(out.du);
  call.need_weight = out.dweight != nullptr, call.need_logits = out.dlogits.data != nullptr;
  if (call.need_logits && out.per_sample_logits) call.dlogits = static_cast<T*>(out.dlogits.data);
  const int64_t tasks = tasks_of(call), S = p.D * call.Kp, G = p.K * call.Kp;
  const int64_t matrix = call.need_weight ? S + G : 0;
  const int64_t logits = call.need_logits && !out.per_sample_logits ? p.I * p.J : 0;
  const Buffer<T> sums(tasks * matrix);
  const Buffer<double> dlogits(tasks * logits);
  std::fill_n(sums.get(), tasks * matrix, T(0));
  std::fill_n(dlogits.get(), tasks * logits, 0.0);
  for_samples(call, tasks, [&](int64_t task, int64_t begin, int64_t end, T* memory, int64_t* index) {
    T* const dS = sums.get() + task * matrix;
    table.shared_backward(call, begin, end, memory, index, {dS, dS + S, dlogits.get() + task * logits});
  });
  add_up<double>(dlogits.get(), logits == 0 ? 0 : tasks, logits, out.dlogits);
  if (!call.need_weight) return;
  // dS + S (dG + dG^T)
  const Buffer<double> total(matrix);
  std::fill_n(total.get(), matrix, 0.0);
  for (int64_t task = 0; task < tasks; ++task) {
    for (int64_t n = 0; n < matrix; ++n) total.get()[n] += static_cast<double>(sums.get()[task * matrix + n]);
  }
  double* const dG = total.get() + S;
  for (int64_t k = 0; k < p.K; ++k) {
    for (int64_t n = 0; n <= k; ++n)
      dG[k * call.Kp + n] = dG[n * call.Kp + k] = dG[k * call.Kp + n] + dG[n * call.Kp + k];
  }
  parallel(p.D, 16, [&](int64_t begin, int64_t end) {
    for (int64_t d = begin; d < end; ++d) {
      double* const row = total.get() + d * call.Kp;
      for (int64_t k = 0; k < p.K; ++k) {
        const double factor = static_cast<double>(call.S[d * call.Kp + k]);
        for (int64_t n = 0; n < p.K; ++n) row[n] += factor * dG[k * call.Kp + n];
      }
      for (int64_t k = 0; k < p.K; ++k) static_cast<T*>(out.dweight)[d * p.K + k] = static_cast<T>(row[k]);
    }
  });
}

template void shared_forward<float>(const SharedProblem&, const SharedOutputs&);
template void shared_forward<double>(const SharedProblem&, const SharedOutputs&);
template void shared_backward<float>(const SharedProblem&, const float*, const float*, const SharedGradients&);
template void shared_backward<double>(const SharedProblem&, const double*, const double*, const SharedGradients&);

}  // namespace capsfast
