
#include <algorithm>
#include <cstdint>
#include <limits>

#include "context.h"
#include "engine.h"
#include "factored_kernels.h"

namespace capsfast {

template <class T>
FactoredCall<T>::FactoredCall(const Problem& p, int64_t lanes) : problem(&p), L(lanes) {
  // A block stays in the second cache of a core, beside the matrices.
  constexpr int64_t kNumbers = (int64_t{1} << 18) / sizeof(T), kMostSamples = 16;
  Kp = rounded(p.K), Dp = rounded(p.D), blocks = (p.I + L - 1) / L;
  matrices = p.shared_outputs ? 1 : p.J;
  const int64_t sample = std::max<int64_t>(1, blocks * L * (2 * Kp + 2 * p.J));
  const int64_t wanted = p.shared_outputs ? 32 / p.J : kMostSamples;
  samples =
      std::clamp<int64_t>(std::min(wanted, kNumbers / sample), 1, std::max<int64_t>(1, std::min(p.B, kMostSamples)));
  in_place = p.mask.data == nullptr && p.K == Kp && p.u.storage == driver::kStorage<T> && p.u.stride[2] == 1;
}

template struct FactoredCall<float>;
template struct FactoredCall<double>;

namespace portable {
template <class T>
const FactoredKernels<T>& factored_table();
}
#if CAPSFAST_X86
namespace avx2 {
template <class T>
const FactoredKernels<T>& factored_table();
}
namespace avx512 {
template <class T>
const FactoredKernels<T>& factored_table();
}
#endif

namespace {

using namespace driver;

template <class T>
const FactoredKernels<T>& factored_kernels() {
#if CAPSFAST_X86
  if (isa() == Isa::avx512) return avx512::factored_table<T>();
  if (isa() == Isa::avx2) return avx2::factored_table<T>();
#endif
  return portable::factored_table<T>();
}

// The matrices, their transposes and the bias, as the kernels read them.
template <class T>
class Matrices {
 public:
  Matrices(const Problem& p, FactoredCall<T>* call)
      : W_(call->matrices * p.D * call->Kp),
        Wt_(call->matrices * p.K * call->Dp),
        bias_(p.bias.data == nullptr ? 0 : p.J * call->Dp) {
    const int64_t D = p.D, K = p.K, Kp = call->Kp, Dp = call->Dp, *stride = p.weight.stride;
    call->W = W_.get(), call->Wt = Wt_.get();
    // Copies squares of the width of a cache line: a column of a large matrix would take a line for every number.
    constexpr int64_t kSide = 64 / sizeof(T);
    const int64_t strips = (D + kSide - 1) / kSide;
    parallel(call->matrices * strips, std::max<int64_t>(1, (1 << 16) / (kSide * Kp)), [&](int64_t begin, int64_t end) {
      for (int64_t strip = begin; strip < end; ++strip) {
        const int64_t g = strip / strips, d0 = strip % strips * kSide, d1 = std::min(d0 + kSide, D);
        T *const W = W_.get() + g * D * Kp, *const Wt = Wt_.get() + g * K * Dp;
        for (int64_t d = d0; d < d1; ++d) {
          gather<T>(p.weight, g * stride[1] + d * stride[2], {1, 1, K}, {0, 0, stride[3]}, W + d * Kp);
          std::fill(W + d * Kp + K, W + (d + 1) * Kp, T(0));
        }
        for (int64_t k = 0; k < K; ++k) {
          for (int64_t d = d0; d < d1; ++d) Wt[k * Dp + d] = W[d * Kp + k];
          if (d1 == D) std::fill(Wt + k * Dp + D, Wt + (k + 1) * Dp, T(0));
        }
      }
    });
    if (p.bias.data == nullptr) return;
    call->bias = bias_.get();
    std::fill_n(bias_.get(), p.J * Dp, T(0));
    for (int64_t j = 0; j < p.J; ++j)
      gather<T>(p.bias, j * p.bias.stride[0], {1, 1, D}, {0, 0, p.bias.stride[1]}, bias_.get() + j * Dp);
  }

 private:
  Buffer<T> W_, Wt_, bias_;
};

// Cuts the samples among tasks, at ends of blocks, and calls f(task, begin, end, memory).
template <class T, class F>
void for_samples(const FactoredCall<T>& call, int64_t tasks, bool backward, const F& f) {
  const int64_t B = call.problem->B, blocks = (B + call.samples - 1) / call.samples;
  const int64_t size = FactoredScratch<T>(call, nullptr, backward).size;
  // Memory for every thread, not for every task: the system hands out memory page by page.
  const LastingBuffer<T> memory(members() * size);
  for_tasks(tasks, [&](int64_t task, int64_t member) {
    T* const scratch = memory.get() + member * size;
    if (poisoned()) std::fill_n(scratch, size, std::numeric_limits<T>::quiet_NaN());  // not numbers of another task
    f(task, blocks * task / tasks * call.samples, std::min(blocks * (task + 1) / tasks * call.samples, B), scratch);
  });
}

// Enough tasks for all threads, and to keep the sums of a task short.
template <class T>
int64_t tasks_of(const FactoredCall<T>& call) {
  const int64_t B = call.problem->B, blocks = (B + call.samples - 1) / call.samples;
  return std::min(blocks, std::max<int64_t>(4 * num_threads(), std::min<int64_t>(64, B / 256)));
}

}  // namespace

template <class T>
void factored_forward(const Problem& p, const ForwardOutputs& out) {
  const FactoredKernels<T>& table = factored_kernels<T>();
  FactoredCall<T> call(p, table.L);
  const Matrices<T> matrices(p, &call);
  call.out = out;
  for_samples(call, tasks_of(call), false,
              [&](int64_t, int64_t begin, int64_t end, T* memory) { table.forward(call, begin, end, memory); });
}

template <class T>
void factored_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out) {
  // From this size on, du is written past the caches. The size is half of the last cache (32 MiB) of the machine where
  // this was measured.
  constexpr int64_t kCaches = int64_t{1} << 24;
  const FactoredKernels<T>& table = factored_kernels<T>();
  FactoredCall<T> call(p, table.L);
  const Matrices<T> matrices(p, &call);
  const auto vector = static_cast<uintptr_t>(call.L) * sizeof(T);
  call.in = in, call.du = out.du;
  call.past_cache = call.in_place && p.B * p.I * p.K * int64_t(sizeof(T)) >= kCaches &&
                    reinterpret_cast<uintptr_t>(out.du.data) % vector == 0;
  call.need_weight = out.dweight.data != nullptr;
  call.need_logits = out.dlogits.data != nullptr;
  call.need_bias = out.dbias.data != nullptr;
  if (out.per_sample_logits) call.dlogits = out.dlogits;
  const int64_t tasks = tasks_of(call), matrix = call.need_weight ? call.matrices * p.D * call.Kp : 0;
  const int64_t logits = call.need_logits && !out.per_sample_logits ? p.I * p.J : 0,
                bias = call.need_bias ? p.J * p.D : 0;
  const Buffer<T> sums(tasks * matrix);
  const Buffer<double> dlogits(tasks * logits), dbias(tasks * bias);
  std::fill_n(sums.get(), tasks * matrix, T(0));
  std::fill_n(dlogits.get(), tasks * logits, 0.0);
  std::fill_n(dbias.get(), tasks * bias, 0.0);
  for_samples(call, tasks, true, [&](int64_t task, int64_t begin, int64_t end, T* memory) {
    table.backward(call, begin, end, memory,
                   {sums.get() + task * matrix, dlogits.get() + task * logits, dbias.get() + task * bias});
  });
  add_up<double>(dlogits.get(), logits == 0 ? 0 : tasks, logits, out.dlogits);
  add_up<double>(dbias.get(), bias == 0 ? 0 : tasks, bias, out.dbias);
  if (!call.need_weight) return;
  parallel(call.matrices * p.D, std::max<int64_t>(1, (1 << 16) / call.Kp), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (int64_t k = 0; k < p.K; ++k) {
        double total = 0;
        for (int64_t task = 0; task < tasks; ++task) total += double(sums.get()[task * matrix + row * call.Kp + k]);
        write<T>(out.dweight, row * p.K + k, static_cast<T>(total));
      }
    }
  });
}

template void factored_forward<float>(const Problem&, const ForwardOutputs&);
template void factored_forward<double>(const Problem&, const ForwardOutputs&);
template void factored_backward<float>(const Problem&, const BackwardInputs&, const BackwardOutputs&);
template void factored_backward<double>(const Problem&, const BackwardInputs&, const BackwardOutputs&);

}  // namespace capsfast
