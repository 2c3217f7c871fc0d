// The op em_update and its backward: the step of EM routing between two passes (Hinton, Sabour, Frosst 2018, procedure
// 1). It turns the moments of a pass into a Gaussian for every output capsule, the activation of the capsule, and the
// score of the next pass. This file registers the op; CUDA tensors take Triton's kernel or the definition.
//
// The moments are relative to a center. With n = 1 / mass, or 0 without mass:
//   shift = first n      m = center + shift      variance = max(0, second n - shift^2) + floor
// Momentum moves m towards the last pose, and the variance is about the moved m. With V_d for the variance of a
// component and beta_u for a sum over the components:
//   log sigma = sum_d log(V_d) / 2      cost = beta_u [+ log sigma]
//   logit = inverse_temperature (beta_a - mass scale cost)
// The activation a is the sigmoid of the logit, or its softmax over j. In the final iteration score is a; before that,
// score is the prior of the next pass: log a - log sigma - D log(2 pi) / 2.
//
// The loops are plain. They take little time beside a pass, which reads I times as many numbers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../../cpu/parallel.h"
#include "../arguments.h"
#include "engine.h"

namespace capsfast {

namespace {

constexpr double kHalfLogTwoPi = 0.91893853320467274178;

// The arguments of a call, contiguous.
struct Call {
  Tensor mass, first, second, center, beta_a, beta_u;  // [B, J], three [B, J, D], two [J]
  OptionalTensor last, out_mask;                       // [B, J, D], none without momentum; [B, J]
  double floor, momentum, inverse_temperature;
  double cost_scale;  // 0: 1 / mean of the mass, over the output capsules that are not masked
  bool isotropic, final, softmax, cost_of_variance;
  int64_t B, J, D;
  ScalarType type;

  explicit Call(Stack& stack) {
    std::string cost, nonlinearity;
    stack >> mass >> first >> second >> center >> beta_a >> beta_u >> last >> out_mask >> floor >> momentum >>
        isotropic >> cost >> cost_scale >> nonlinearity >> inverse_temperature >> final;
    cost_of_variance = choice_of<bool>("cost", cost, {"mass", "variance"});
    softmax = choice_of<bool>("nonlinearity", nonlinearity, {"sigmoid", "softmax"});
    type = mass.scalar_type();
    STD_TORCH_CHECK(
        type == ScalarType::Float || type == ScalarType::Double, "capsfast: em_update takes float32 and float64");
    STD_TORCH_CHECK(first.dim() == 3, "capsfast: first must be [B, J, D]");
    B = first.size(0), J = first.size(1), D = first.size(2);
    take("mass", mass, {B, J}, type);
    for (Tensor* each : {&first, &second, &center}) take("first, second and center", *each, {B, J, D}, type);
    for (Tensor* each : {&beta_a, &beta_u}) take("beta_a and beta_u", *each, {J}, type);
    take("last", last, {B, J, D}, type);
    take("out_mask", out_mask, {B, J}, ScalarType::Bool);
  }
  static void take(const char* name, Tensor& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    Arguments<CpuEngine>::expect(name, tensor, sizes);
    STD_TORCH_CHECK(tensor.scalar_type() == dtype, "capsfast: ", name, " has a dtype that does not fit");
    tensor = torch::stable::contiguous(tensor);
  }
  static void take(const char* name, OptionalTensor& tensor, std::initializer_list<int64_t> sizes, ScalarType dtype) {
    if (tensor.has_value()) take(name, *tensor, sizes, dtype);
  }
};

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}
template <class T>
const T* data(const OptionalTensor& tensor) {
  return tensor.has_value() ? data<T>(*tensor) : nullptr;
}

// As in capsfast/reference/em_update.py.
template <class T>
T inverse(T mass) {
  return mass > T(1e-12) ? T(1) / mass : T(0);
}

// The sum of the logarithms. The product of six float32, even of the smallest, fits a double and takes one logarithm.
template <class T>
double sum_of_logs(const T* x, int64_t count) {
  constexpr int64_t kTogether = sizeof(T) == 4 ? 6 : 1;
  double sum = 0;
  for (int64_t n = 0; n < count; n += kTogether) {
    double product = 1;
    for (int64_t d = n; d < std::min(n + kTogether, count); ++d) product *= double(x[d]);
    sum += std::log(product);
  }
  return sum;
}

// What forward and backward compute for one sample.
template <class T>
struct Sample {
  const Call& call;
  const int64_t J = call.J, D = call.D;
  const T *const masses = data<T>(call.mass), *const firsts = data<T>(call.first),
                 *const seconds = data<T>(call.second);
  const T *const centers = data<T>(call.center), *const lasts = data<T>(call.last);
  const T *const beta_a = data<T>(call.beta_a), *const beta_u = data<T>(call.beta_u);
  const bool* const out_mask = data<bool>(call.out_mask);

  // One allocation: a part of a batch may be a few samples.
  std::vector<T> memory = std::vector<T>(size_t(J * (3 * D + 7)));
  // [J, D]: m - center without momentum, how far momentum moves m, and the variance.
  T *const shift = memory.data(), *const held = shift + J * D, *const variance = held + J * D;
  // [J]: 1 / mass; e = exp(-|logit|) and 1 - a, of a sigmoid.
  T *const n = variance + J * D, *const log_sigma = n + J, *const cost = log_sigma + J, *const logit = cost + J;
  T *const activation = logit + J, *const e = activation + J, *const complement = e + J;
  T most = 0, log_of_sum = 0;              // of a softmax: the largest logit, and log sum exp(logit - most)
  T scale = 0, of_mean = 0, of_total = 0;  // of_mean: 1 / mean of the mass; of_total: 1 / its sum

  bool absent(int64_t b, int64_t j) const { return out_mask != nullptr && !out_mask[b * J + j]; }

  void evaluate(int64_t b) {
    const T* const mass = masses + b * J;
    T total = 0, there = 0;
    for (int64_t j = 0; j < J; ++j) total += mass[j], there += T(!absent(b, j));
    of_total = inverse(total), of_mean = there * of_total;
    scale = call.cost_scale > 0 ? T(call.cost_scale) : of_mean;
    for (int64_t j = 0; j < J; ++j) {
      n[j] = inverse(mass[j]);
      find_variance(b * J * D, j);
      log_sigma[j] = T(0.5 * sum_of_logs(variance + j * D, D));
      cost[j] = call.cost_of_variance ? beta_u[j] + log_sigma[j] : beta_u[j];
      logit[j] = T(call.inverse_temperature) * (beta_a[j] - mass[j] * scale * cost[j]);
    }
    call.softmax ? find_softmax(b) : find_sigmoid();
  }

  // start: index of the first number of the sample.
  void find_variance(int64_t start, int64_t j) {
    const T *const first = firsts + start, *const second = seconds + start, *const center = centers + start;
    const T floor = T(call.floor), momentum = T(call.momentum), of_mass = n[j];
    T* __restrict moved = shift, * __restrict by = held, * __restrict v = variance;
    for (int64_t d = j * D; d < (j + 1) * D; ++d) {
      const T m = first[d] * of_mass, h = lasts == nullptr ? T(0) : momentum * (lasts[start + d] - (center[d] + m));
      const T x = second[d] * of_mass - m * m + h * h;
      // Rounding alone makes x negative, so the backward ignores the cut. std::max would hide a NaN.
      moved[d] = m, by[d] = h, v[d] = (x < T(0) ? T(0) : x) + floor;
    }
    if (!call.isotropic) return;
    T sum = 0;
    for (int64_t d = j * D; d < (j + 1) * D; ++d) sum += v[d];
    std::fill_n(v + j * D, D, sum / T(D));
  }

  void find_sigmoid() {
    for (int64_t j = 0; j < J; ++j) {
      e[j] = std::exp(-std::abs(logit[j]));
      const T more = T(1) / (T(1) + e[j]), less = e[j] * more;
      activation[j] = logit[j] < T(0) ? less : more;
      complement[j] = logit[j] < T(0) ? more : less;
    }
  }

  void find_softmax(int64_t b) {
    T sum = 0;
    most = -std::numeric_limits<T>::infinity();
    for (int64_t j = 0; j < J; ++j) {
      // Not -inf: a sample whose output capsules are all masked would become NaN.
      if (absent(b, j)) logit[j] = std::numeric_limits<T>::lowest();
      most = logit[j] > most || logit[j] != logit[j] ? logit[j] : most;
    }
    for (int64_t j = 0; j < J; ++j) sum += activation[j] = std::exp(logit[j] - most);
    for (int64_t j = 0; j < J; ++j) activation[j] /= sum;
    log_of_sum = std::log(sum);
  }

  T log_activation(int64_t j) const {
    return call.softmax ? logit[j] - most - log_of_sum : std::min(logit[j], T(0)) - std::log1p(e[j]);
  }
};

// f(sample, b) for every sample b.
template <class T, class F>
void for_samples(const Call& call, const F& f) {
  const int64_t numbers = std::max<int64_t>(1, call.J * call.D);
  with_team(call.B * numbers >= 4 * 1024, [&] {
    parallel(call.B, std::max<int64_t>(1, 1024 / numbers), [&](int64_t begin, int64_t end) {
      Sample<T> sample{call};
      for (int64_t b = begin; b < end; ++b) sample.evaluate(b), f(sample, b);
    });
  });
}

// Gradients of results, null for 0, and of arguments. dlast is null without momentum.
template <class T>
struct Gradients {
  const T *dposes, *dprecision, *dscore;
  T *dmass, *dfirst, *dsecond, *dcenter, *dlast;
  T *of_beta_a, *of_beta_u;  // [B, J]: shares of the samples

  // The gradients of the components of capsule j of sample b, given dlog_sigma. Returns the gradient of 1 / mass.
  T components(const Sample<T>& s, int64_t b, int64_t j, T dlog_sigma) const {
    const int64_t start = b * s.J * s.D;
    const auto of_variance = [&](int64_t d) {
      const T precision = T(1) / s.variance[d], given = dprecision == nullptr ? T(0) : dprecision[start + d];
      return precision * (T(0.5) * dlog_sigma - given * precision);
    };
    T sum = 0, dn = 0;
    for (int64_t d = j * s.D; d < (j + 1) * s.D && s.call.isotropic; ++d) sum += of_variance(d);
    for (int64_t d = j * s.D, at = start + d; d < (j + 1) * s.D; ++d, ++at) {
      const T dvariance = s.call.isotropic ? sum / T(s.D) : of_variance(d);
      const T dpose = dposes == nullptr ? T(0) : dposes[at];
      const T of_last = dlast == nullptr ? T(0) : T(s.call.momentum) * (T(2) * s.held[d] * dvariance + dpose);
      const T dshift = dpose - of_last - T(2) * s.shift[d] * dvariance;
      dn += dvariance * s.seconds[at] + dshift * s.firsts[at];
      dfirst[at] = dshift * s.n[j], dsecond[at] = dvariance * s.n[j], dcenter[at] = dpose - of_last;
      if (dlast != nullptr) dlast[at] = of_last;
    }
    return dn;
  }

  void operator()(const Sample<T>& s, int64_t b) const {
    const auto of_log_activation = [&](int64_t j) {
      const T given = dscore == nullptr ? T(0) : dscore[b * s.J + j];
      return s.call.final ? given * s.activation[j] : given;
    };
    T sum = 0, dscale = 0;
    for (int64_t j = 0; j < s.J && s.call.softmax; ++j) sum += of_log_activation(j);
    for (int64_t j = 0; j < s.J; ++j) {
      const int64_t row = b * s.J + j;
      const T mass = s.masses[row], dlog_activation = of_log_activation(j);
      T dlogit = dlog_activation * s.complement[j];
      if (s.call.softmax) dlogit = s.absent(b, j) ? T(0) : dlog_activation - s.activation[j] * sum;
      const T dcost = -T(s.call.inverse_temperature) * dlogit;  // of mass scale cost
      of_beta_a[row] = -dcost, of_beta_u[row] = dcost * mass * s.scale;
      dscale += dcost * mass * s.cost[j];
      const T of_score = s.call.final ? T(0) : dlog_activation,
              of_cost = s.call.cost_of_variance ? of_beta_u[row] : T(0);
      const T dn = components(s, b, j, of_cost - of_score);
      // Without mass there is no gradient, even if the sum is NaN.
      dmass[row] = dcost * s.scale * s.cost[j] - (s.n[j] == T(0) ? T(0) : s.n[j] * s.n[j] * dn);
    }
    for (int64_t j = 0; j < s.J && !(s.call.cost_scale > 0); ++j) dmass[b * s.J + j] -= dscale * s.of_mean * s.of_total;
  }

  // Adds the shares of the samples to [J]: in double, and always in the same order.
  static void add_up(const Call& call, const T* shares, T* total) {
    std::vector<double> sum(static_cast<size_t>(call.J));
    for (int64_t n = 0; n < call.B * call.J; ++n) sum[n % call.J] += double(shares[n]);
    std::copy(sum.begin(), sum.end(), total);
  }
};

// A new tensor of the shape of `like`, [0] if it is not wanted.
Tensor made(const Tensor& like, bool wanted = true) {
  return wanted ? empty(like, like.sizes().data(), like.sizes().size(), like.scalar_type())
                : empty(like, {0}, like.scalar_type());
}

void em_update(Stack& stack) {
  const Call call(stack);
  const Tensor poses = made(call.first), precision = made(call.first, !call.final), score = made(call.mass);
  with_type(call.type, [&](auto zero) {
    using T = decltype(zero);
    T *const pose = data<T>(poses), *const of_variance = data<T>(precision), *const found = data<T>(score);
    for_samples<T>(call, [&](const Sample<T>& s, int64_t b) {
      const int64_t start = b * s.J * s.D, end = start + s.J * s.D;
      for (int64_t at = start; at < end; ++at) pose[at] = s.centers[at] + s.shift[at - start] + s.held[at - start];
      for (int64_t j = 0; j < s.J; ++j) {
        const T prior = s.log_activation(j) - s.log_sigma[j] - T(s.D) * T(kHalfLogTwoPi);
        found[b * s.J + j] = call.final ? s.activation[j] : prior;
      }
      if (call.final) return;
      for (int64_t at = start; at < end; ++at) of_variance[at] = T(1) / s.variance[at - start];
    });
  });
  stack.give({poses, precision, score});
}

void em_update_backward(Stack& stack) {
  OptionalTensor dposes, dprecision, dscore;
  stack >> dposes >> dprecision >> dscore;
  const Call call(stack);
  const std::vector<bool> needed = stack.needed(7);
  Call::take("dposes", dposes, {call.B, call.J, call.D}, call.type);
  Call::take("dprecision", dprecision, {call.B, call.J, call.D}, call.type);
  Call::take("dscore", dscore, {call.B, call.J}, call.type);
  const bool of_last = call.last.has_value();
  const Tensor dmass = made(call.mass), dfirst = made(call.first), dsecond = made(call.first),
               dcenter = made(call.first), dlast = made(call.first, of_last), of_beta_a = made(call.mass),
               of_beta_u = made(call.mass), dbeta_a = made(call.beta_a), dbeta_u = made(call.beta_u);
  with_type(call.type, [&](auto zero) {
    using T = decltype(zero);
    const Gradients<T> gradients{
        data<T>(dposes),    data<T>(dprecision), data<T>(dscore),  data<T>(dmass),
        data<T>(dfirst),    data<T>(dsecond),    data<T>(dcenter), of_last ? data<T>(dlast) : nullptr,
        data<T>(of_beta_a), data<T>(of_beta_u)};
    for_samples<T>(call, gradients);
    gradients.add_up(call, gradients.of_beta_a, data<T>(dbeta_a));
    gradients.add_up(call, gradients.of_beta_u, data<T>(dbeta_u));
  });
  const auto kept = [&](const Tensor& gradient, size_t n) { return needed[n] ? gradient : made(gradient, false); };
  stack.give({kept(dmass, 0), kept(dfirst, 1), kept(dsecond, 2), kept(dcenter, 3), kept(dbeta_a, 4), kept(dbeta_u, 5),
              kept(dlast, 6)});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(capsfast, CPU, m) {
  m.impl("em_update", &boxed<em_update>);
  m.impl("em_update_backward", &boxed<em_update_backward>);
}

}  // namespace capsfast
