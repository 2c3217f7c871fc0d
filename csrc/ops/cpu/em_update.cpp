#include "em_update.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../../cpu/parallel.h"
#include "memory.h"

namespace capsfast {

namespace {

constexpr double kHalfLogTwoPi = 0.91893853320467274178;

// As in capsfast/reference/em_update.py.
template <class T>
T inverse(T mass) {
  return mass > T(1e-12) ? T(1) / mass : T(0);
}

// The sum of the logarithms. A product of six float32, even of the smallest, is a double: one logarithm does for it.
inline double sum_of_logs(const float* x, int64_t count) {
  double sum = 0;
  for (int64_t n = 0; n < count; n += 6) {
    double product = 1;
    for (int64_t d = n; d < std::min(n + 6, count); ++d) product *= double(x[d]);
    sum += std::log(product);
  }
  return sum;
}
inline double sum_of_logs(const double* x, int64_t count) {
  double sum = 0;
  for (int64_t d = 0; d < count; ++d) sum += std::log(x[d]);
  return sum;
}

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}
template <class T>
T log_sigmoid(T x) {
  return std::min(x, T(0)) - std::log1p(std::exp(-std::abs(x)));
}

// One sample: everything that forward and backward need of it.
template <class T>
class Sample {
 public:
  Sample(const EmProblem& p, const EmInputs<T>& in) : p_(p), in_(in), size_(static_cast<size_t>(p.J)) {
    for (std::vector<T>* each : {&log_sigma, &cost, &logit, &activation}) each->resize(size_);
    variance.resize(size_ * static_cast<size_t>(p.D));
  }

  std::vector<T> variance;                            // [J, D]
  std::vector<T> log_sigma, cost, logit, activation;  // [J]; cost: of a mass of 1; activation: of a softmax
  T total = 0, there = 0;                             // of the mass; how many output capsules
  T scale = 0;                                        // of the cost

  // Poses go to `poses` [J, D], which may be null.
  void find(int64_t b, T* poses) {
    const int64_t J = p_.J, D = p_.D;
    const T* const mass = in_.mass + b * J;
    total = 0;
    for (int64_t j = 0; j < J; ++j) total += mass[j];
    there = T(p_.there(b));
    scale = p_.cost_scale > 0 ? T(p_.cost_scale) : there * inverse(total);
    for (int64_t j = 0; j < J; ++j) {
      const int64_t row = (b * J + j) * D;
      T* const v = variance.data() + j * D;
      moments(mass[j], row, v, poses == nullptr ? nullptr : poses + j * D);
      double each = double(D) * double(in_.beta_u[j]);
      if (p_.component_beta) {
        each = 0;
        for (int64_t d = 0; d < D; ++d) each += double(in_.beta_u[j * D + d]);
      }
      const double log_of = 0.5 * sum_of_logs(v, D);
      log_sigma[size_t(j)] = T(log_of);
      cost[size_t(j)] = T(p_.cost_of_variance ? each + log_of : each);
      logit[size_t(j)] = T(p_.inverse_temperature) * (in_.beta_a[j] - mass[j] * scale * cost[size_t(j)]);
    }
    if (p_.softmax) find_softmax(b);
  }

  // n, shift, and by how much momentum moves the pose.
  struct At {
    T n, shift, held;
  };
  At at(T mass, int64_t element) const {
    const T n = inverse(mass), shift = in_.first[element] * n;
    if (p_.momentum == 0) return {n, shift, T(0)};
    const T before = in_.last == nullptr ? T(0) : in_.last[element];
    return {n, shift, T(p_.momentum) * (before - (in_.center[element] + shift))};
  }
  // Before it is cut at 0.
  T raw_variance(const At& a, int64_t element) const {
    return in_.second[element] * a.n - a.shift * a.shift + a.held * a.held;
  }

  T log_activation(int64_t j) const {
    return p_.softmax ? logit[size_t(j)] - most_ - log_of_sum_ : log_sigmoid(logit[size_t(j)]);
  }
  T activation_of(int64_t j) const { return p_.softmax ? activation[size_t(j)] : sigmoid(logit[size_t(j)]); }

 private:
  void moments(T mass, int64_t row, T* v, T* poses) const {
    const int64_t D = p_.D;
    T mean = 0;
    for (int64_t d = 0; d < D; ++d) {
      const At a = at(mass, row + d);
      const T raw = raw_variance(a, row + d);
      // Not std::max, which would hide what is not a number.
      v[d] = (raw < T(0) ? T(0) : raw) + T(p_.floor);
      mean += v[d];
      if (poses != nullptr) poses[d] = in_.center[row + d] + a.shift + a.held;
    }
    if (p_.isotropic && D > 0) std::fill_n(v, D, mean / T(D));
  }

  void find_softmax(int64_t b) {
    T most = -std::numeric_limits<T>::infinity(), sum = 0;
    for (int64_t j = 0; j < p_.J; ++j) {
      T& x = logit[size_t(j)];
      if (p_.out_mask.data != nullptr && !p_.out_mask.at(b, j)) x = std::numeric_limits<T>::lowest();
      most = x > most || x != x ? x : most;
    }
    for (int64_t j = 0; j < p_.J; ++j) sum += activation[size_t(j)] = std::exp(logit[size_t(j)] - most);
    for (T& a : activation) a /= sum;
    most_ = most, log_of_sum_ = std::log(sum);
  }

  const EmProblem& p_;
  const EmInputs<T>& in_;
  size_t size_;
  T most_ = 0, log_of_sum_ = 0;  // of the softmax: the largest logit, and the sum less that
};

bool worth_sharing(const EmProblem& p) { return double(p.B) * double(p.J) * double(p.D) >= 4 * 1024; }

// f(sample, b) for every sample.
template <class T, class F>
void for_samples(const EmProblem& p, const EmInputs<T>& in, const F& f) {
  with_team(worth_sharing(p), [&] {
    parallel(p.B, std::max<int64_t>(1, 1024 / std::max<int64_t>(1, p.J * p.D)), [&](int64_t begin, int64_t end) {
      Sample<T> sample(p, in);
      for (int64_t b = begin; b < end; ++b) f(sample, b);
    });
  });
}

// The gradients of logit and log sigma [J] of a sample, from that of score.
template <class T>
void differentiate_score(const EmProblem& p, const Sample<T>& sample, int64_t b, const T* dscore, T* dlogit,
                         T* dlog_sigma) {
  std::fill_n(dlog_sigma, p.J, T(0));
  std::fill_n(dlogit, p.J, T(0));
  if (dscore == nullptr) return;
  const T* const d = dscore + b * p.J;
  T sum = 0;
  for (int64_t j = 0; j < p.J && p.softmax; ++j) sum += p.final ? d[j] * sample.activation_of(j) : d[j];
  for (int64_t j = 0; j < p.J; ++j) {
    if (!p.final) dlog_sigma[j] = -d[j];
    const T a = sample.activation_of(j);
    if (p.softmax) {
      const bool absent = p.out_mask.data != nullptr && !p.out_mask.at(b, j);
      if (!absent) dlogit[j] = p.final ? a * (d[j] - sum) : d[j] - a * sum;
    } else {
      dlogit[j] = d[j] * (p.final ? a * (T(1) - a) : sigmoid(-sample.logit[size_t(j)]));
    }
  }
}

}  // namespace

template <class T>
void em_update(const EmProblem& p, const EmInputs<T>& in, const EmOutputs<T>& out) {
  for_samples<T>(p, in, [&](Sample<T>& sample, int64_t b) {
    sample.find(b, out.poses + b * p.J * p.D);
    for (int64_t j = 0; j < p.J; ++j) {
      const int64_t n = b * p.J + j;
      const T* const v = sample.variance.data() + j * p.D;
      for (int64_t d = 0; d < p.D && out.precision != nullptr; ++d) out.precision[n * p.D + d] = T(1) / v[d];
      const T prior = sample.log_activation(j) - (sample.log_sigma[size_t(j)] + T(p.D) * T(kHalfLogTwoPi));
      out.score[n] = p.final ? sample.activation_of(j) : prior;
    }
  });
}

template <class T>
void em_update_backward(const EmProblem& p, const EmInputs<T>& in, const EmGradients<T>& g) {
  const int64_t J = p.J, D = p.D;
  const T rate = T(p.inverse_temperature);
  // Of every sample, so that sums over samples are always formed in the same order.
  const Buffer<T> dlogits(p.B * J), dcosts(p.B * J);
  for_samples<T>(p, in, [&](Sample<T>& sample, int64_t b) {
    sample.find(b, nullptr);
    std::vector<T> dlog_sigma(static_cast<size_t>(J)), dmass(static_cast<size_t>(J));
    T* const dlogit = dlogits.get() + b * J;
    differentiate_score(p, sample, b, g.dscore, dlogit, dlog_sigma.data());
    T dscale = 0;
    for (int64_t j = 0; j < J; ++j) {
      const size_t n = size_t(j);
      const T mass = in.mass[b * J + j], dcost = -rate * dlogit[j];  // of mass scale cost
      dmass[n] = dcost * sample.scale * sample.cost[n];
      dscale += dcost * mass * sample.cost[n];
      dcosts.get()[b * J + j] = dcost * mass * sample.scale;
      if (p.cost_of_variance) dlog_sigma[n] += dcost * mass * sample.scale;
    }
    if (!(p.cost_scale > 0)) {
      const T of_total = inverse(sample.total);
      for (T& each : dmass) each -= dscale * sample.there * of_total * of_total;
    }
    for (int64_t j = 0; j < J; ++j) {
      const int64_t row = (b * J + j) * D;
      const T mass = in.mass[b * J + j];
      const T* const v = sample.variance.data() + j * D;
      const auto of_variance = [&](int64_t d) {
        const T precision = T(1) / v[d];
        const T given = g.dprecision == nullptr ? T(0) : g.dprecision[row + d] * precision * precision;
        return T(0.5) * dlog_sigma[size_t(j)] * precision - given;
      };
      T shared = 0;
      for (int64_t d = 0; d < D && p.isotropic; ++d) shared += of_variance(d) / T(D);
      T dn = 0;
      for (int64_t d = 0; d < D; ++d) {
        const auto a = sample.at(mass, row + d);
        const T all = p.isotropic ? shared : of_variance(d);
        const T dvariance = sample.raw_variance(a, row + d) >= T(0) ? all : T(0);
        const T dpose = g.dposes == nullptr ? T(0) : g.dposes[row + d];
        const T dheld = T(2) * a.held * dvariance + dpose;
        const T dlast = p.momentum == 0 ? T(0) : T(p.momentum) * dheld;
        const T dcenter = dpose - dlast, dshift = dcenter - T(2) * a.shift * dvariance;
        dn += dvariance * in.second[row + d] + dshift * in.first[row + d];
        if (g.dfirst != nullptr) g.dfirst[row + d] = dshift * a.n;
        if (g.dsecond != nullptr) g.dsecond[row + d] = dvariance * a.n;
        if (g.dcenter != nullptr) g.dcenter[row + d] = dcenter;
        if (g.dlast != nullptr) g.dlast[row + d] = dlast;
      }
      const T n = inverse(mass);
      // Without mass there is no gradient, also where the sum is none.
      if (g.dmass != nullptr) g.dmass[b * J + j] = dmass[size_t(j)] - (n == 0 ? T(0) : n * n * dn);
    }
  });
  std::vector<double> logit(static_cast<size_t>(J)), cost(static_cast<size_t>(J));
  for (int64_t n = 0; n < p.B * J; ++n) {
    logit[size_t(n % J)] += double(dlogits.get()[n]);
    cost[size_t(n % J)] += double(dcosts.get()[n]);
  }
  for (int64_t j = 0; j < J; ++j) {
    const double of_beta_u = cost[size_t(j)];
    if (g.dbeta_a != nullptr) g.dbeta_a[j] = T(p.inverse_temperature * logit[size_t(j)]);
    if (g.dbeta_u == nullptr) continue;
    if (p.component_beta) {
      std::fill_n(g.dbeta_u + j * D, D, T(of_beta_u));
    } else {
      g.dbeta_u[j] = T(double(D) * of_beta_u);
    }
  }
}

template void em_update<float>(const EmProblem&, const EmInputs<float>&, const EmOutputs<float>&);
template void em_update<double>(const EmProblem&, const EmInputs<double>&, const EmOutputs<double>&);
template void em_update_backward<float>(const EmProblem&, const EmInputs<float>&, const EmGradients<float>&);
template void em_update_backward<double>(const EmProblem&, const EmInputs<double>&, const EmGradients<double>&);

}  // namespace capsfast
