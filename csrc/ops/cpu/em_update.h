// The step of EM routing between two passes, and its gradient (Hinton, Sabour, Frosst 2018, procedure 1). The step
// turns the moments of a pass into a Gaussian for every output capsule, the activation of the capsule, and the score of
// the next pass. em_update.cpp has the op of one step, em_routing.cpp the op of a whole routing.
//
// The moments are relative to a center. With n = 1 / mass, or 0 without mass:
//   shift = first n      m = center + shift      variance = max(0, second n - shift^2) + floor
// Momentum moves m towards the last pose, and the variance is about the moved m. With V_d for the variance of a
// component and beta_u for the mean of the components:
//   log sigma = sum_d log(V_d) / 2      cost = D beta_u [+ log sigma]
//   logit = inverse_temperature (beta_a - mass scale cost)
// The activation a is the sigmoid of the logit, or its softmax over j. In the final iteration score is a; before that,
// score is the prior of the next pass: log a - log sigma - D log(2 pi) / 2.
//
// The loops are plain. They take little time beside a pass, which reads I times as many numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../../cpu/parallel.h"
#include "../arguments.h"

namespace capsfast::em {

// What all iterations have in common.
struct Options {
  double floor, momentum;
  double cost_scale;  // 0: 1 / mean of the mass, over the output capsules that are not masked
  bool isotropic, softmax, cost_of_variance;

  void take(Stack& stack) {
    std::string cost, nonlinearity;
    stack >> floor >> momentum >> isotropic >> cost >> cost_scale >> nonlinearity;
    cost_of_variance = choice_of<bool>("cost", cost, {"mass", "variance"});
    softmax = choice_of<bool>("nonlinearity", nonlinearity, {"sigmoid", "softmax"});
  }
};

// The arguments of a step, contiguous.
template <class T>
struct Step {
  Options options;
  double inverse_temperature;
  bool final;
  bool held;  // momentum holds the poses back
  int64_t B, J, D;
  const T *mass, *first, *second, *center;  // [B, J], three [B, J, D]
  const T* last;                            // [B, J, D]; null is 0
  const T *beta_a, *beta_u;                 // [J]
  MaskView out_mask;                        // [B, J]
};

inline constexpr double kHalfLogTwoPi = 0.91893853320467274178;

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
  const Step<T>& step;
  const Options& options = step.options;
  const int64_t J = step.J, D = step.D;

  // One allocation: a part of a batch may be a few samples.
  std::vector<T> memory = std::vector<T>(size_t(J * (3 * D + 7)));
  // [J, D]: m - center without momentum, how far momentum moves m, and the variance.
  T *const shift = memory.data(), *const held = shift + J * D, *const variance = held + J * D;
  // [J]: 1 / mass; e = exp(-|logit|) and 1 - a, of a sigmoid.
  T *const n = variance + J * D, *const log_sigma = n + J, *const cost = log_sigma + J, *const logit = cost + J;
  T *const activation = logit + J, *const e = activation + J, *const complement = e + J;
  T most = 0, log_of_sum = 0;              // of a softmax: the largest logit, and log sum exp(logit - most)
  T scale = 0, of_mean = 0, of_total = 0;  // of_mean: 1 / mean of the mass; of_total: 1 / its sum

  bool absent(int64_t b, int64_t j) const { return step.out_mask.data != nullptr && !step.out_mask.at(b, j); }

  void evaluate(int64_t b) {
    const T* const mass = step.mass + b * J;
    T total = 0, there = 0;
    for (int64_t j = 0; j < J; ++j) total += mass[j], there += T(!absent(b, j));
    of_total = inverse(total), of_mean = there * of_total;
    scale = options.cost_scale > 0 ? T(options.cost_scale) : of_mean;
    for (int64_t j = 0; j < J; ++j) {
      n[j] = inverse(mass[j]);
      find_variance(b * J * D, j);
      log_sigma[j] = T(0.5 * sum_of_logs(variance + j * D, D));
      cost[j] = T(D) * step.beta_u[j] + (options.cost_of_variance ? log_sigma[j] : T(0));
      logit[j] = T(step.inverse_temperature) * (step.beta_a[j] - mass[j] * scale * cost[j]);
    }
    options.softmax ? find_softmax(b) : find_sigmoid();
  }

  // start: index of the first number of the sample.
  void find_variance(int64_t start, int64_t j) {
    const T *const first = step.first + start, *const second = step.second + start, *const center = step.center + start;
    const T floor = T(options.floor), momentum = T(options.momentum), of_mass = n[j];
    T* __restrict moved = shift, * __restrict by = held, * __restrict v = variance;
    for (int64_t d = j * D; d < (j + 1) * D; ++d) {
      const T m = first[d] * of_mass, h = step.held ? momentum * (last(start + d) - (center[d] + m)) : T(0);
      const T x = second[d] * of_mass - m * m + h * h;
      // Rounding alone makes x negative, so the backward ignores the cut. std::max would hide a NaN.
      moved[d] = m, by[d] = h, v[d] = (x < T(0) ? T(0) : x) + floor;
    }
    if (!options.isotropic) return;
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

  T last(int64_t at) const { return step.last == nullptr ? T(0) : step.last[at]; }

  T log_activation(int64_t j) const {
    return options.softmax ? logit[j] - most - log_of_sum : std::min(logit[j], T(0)) - std::log1p(e[j]);
  }
};

// f(sample, b) for every sample b.
template <class T, class F>
void for_samples(const Step<T>& step, const F& f) {
  const int64_t numbers = std::max<int64_t>(1, step.J * step.D);
  with_team(step.B * numbers >= 4 * 1024, [&] {
    parallel(step.B, std::max<int64_t>(1, 1024 / numbers), [&](int64_t begin, int64_t end) {
      Sample<T> sample{step};
      for (int64_t b = begin; b < end; ++b) sample.evaluate(b), f(sample, b);
    });
  });
}

// Writes the results of the step. The final step has no precision.
template <class T>
void update(const Step<T>& step, T* poses, T* precision, T* score) {
  for_samples<T>(step, [&](const Sample<T>& s, int64_t b) {
    const int64_t start = b * s.J * s.D, end = start + s.J * s.D;
    for (int64_t at = start; at < end; ++at) poses[at] = step.center[at] + s.shift[at - start] + s.held[at - start];
    for (int64_t j = 0; j < s.J; ++j) {
      const T prior = s.log_activation(j) - s.log_sigma[j] - T(s.D) * T(kHalfLogTwoPi);
      score[b * s.J + j] = step.final ? s.activation[j] : prior;
    }
    if (step.final) return;
    for (int64_t at = start; at < end; ++at) precision[at] = T(1) / s.variance[at - start];
  });
}

// Gradients of results, null for 0, and of arguments. dlast is null where it is not wanted. dcenter may be dposes.
template <class T>
struct Gradients {
  const T *dposes, *dprecision, *dscore;
  T *dmass, *dfirst, *dsecond, *dcenter, *dlast;
  T *of_beta_a, *of_beta_u;  // [B, J]: shares of the samples

  // The gradients of the components of capsule j of sample b, given dlog_sigma. Returns the gradient of 1 / mass.
  T components(const Sample<T>& s, int64_t b, int64_t j, T dlog_sigma) const {
    const int64_t start = b * s.J * s.D;
    const auto of_variance = [&](int64_t d) {
      const T precision = T(1) / s.variance[d], upstream = dprecision == nullptr ? T(0) : dprecision[start + d];
      return precision * (T(0.5) * dlog_sigma - upstream * precision);
    };
    T sum = 0, dn = 0;
    for (int64_t d = j * s.D; d < (j + 1) * s.D && s.options.isotropic; ++d) sum += of_variance(d);
    for (int64_t d = j * s.D, at = start + d; d < (j + 1) * s.D; ++d, ++at) {
      const T dvariance = s.options.isotropic ? sum / T(s.D) : of_variance(d);
      const T dpose = dposes == nullptr ? T(0) : dposes[at];
      const T of_last = s.step.held ? T(s.options.momentum) * (T(2) * s.held[d] * dvariance + dpose) : T(0);
      const T dshift = dpose - of_last - T(2) * s.shift[d] * dvariance;
      dn += dvariance * s.step.second[at] + dshift * s.step.first[at];
      dfirst[at] = dshift * s.n[j], dsecond[at] = dvariance * s.n[j], dcenter[at] = dpose - of_last;
      if (dlast != nullptr) dlast[at] = of_last;
    }
    return dn;
  }

  void operator()(const Sample<T>& s, int64_t b) const {
    const auto of_log_activation = [&](int64_t j) {
      const T upstream = dscore == nullptr ? T(0) : dscore[b * s.J + j];
      return s.step.final ? upstream * s.activation[j] : upstream;
    };
    T sum = 0, dscale = 0;
    for (int64_t j = 0; j < s.J && s.options.softmax; ++j) sum += of_log_activation(j);
    for (int64_t j = 0; j < s.J; ++j) {
      const int64_t row = b * s.J + j;
      const T mass = s.step.mass[row], dlog_activation = of_log_activation(j);
      T dlogit = dlog_activation * s.complement[j];
      if (s.options.softmax) dlogit = s.absent(b, j) ? T(0) : dlog_activation - s.activation[j] * sum;
      const T dcost = -T(s.step.inverse_temperature) * dlogit;  // of mass scale cost
      const T dterms = dcost * mass * s.scale;
      of_beta_a[row] = -dcost, of_beta_u[row] = T(s.D) * dterms;
      dscale += dcost * mass * s.cost[j];
      const T of_score = s.step.final ? T(0) : dlog_activation, of_cost = s.options.cost_of_variance ? dterms : T(0);
      const T dn = components(s, b, j, of_cost - of_score);
      // Without mass there is no gradient, even if the sum is NaN.
      dmass[row] = dcost * s.scale * s.cost[j] - (s.n[j] == T(0) ? T(0) : s.n[j] * s.n[j] * dn);
    }
    for (int64_t j = 0; j < s.J && !(s.options.cost_scale > 0); ++j)
      dmass[b * s.J + j] -= dscale * s.of_mean * s.of_total;
  }
};

// Adds the sum of the shares [B, J] of the samples to [J]: formed in double, and always in the same order.
template <class T>
void add_shares(const T* shares, int64_t B, int64_t J, T* total) {
  std::vector<double> sum(static_cast<size_t>(J));
  for (int64_t n = 0; n < B * J; ++n) sum[n % J] += double(shares[n]);
  for (int64_t j = 0; j < J; ++j) total[j] += T(sum[j]);
}

}  // namespace capsfast::em
