// The squash v = f(n) s with n = |s|^2, and the derivative of f, for CPU and CUDA.
// capsfast/reference/squash.py holds the same factors f.
#pragma once

#include <cmath>

#include "host_device.h"

namespace capsfast {

enum class Squash : int { paper, half, eps_outside, exp, unit, identity };

// f(n).
template <class T>
CAPSFAST_HOST_DEVICE inline T radial(Squash kind, T n, T eps) {
  switch (kind) {
    case Squash::paper:
      return n / (1 + n) / std::sqrt(n + eps);
    case Squash::half:
      return n / (T(0.5) + n) / std::sqrt(n + eps);
    case Squash::eps_outside:
      return n / (1 + n) / (std::sqrt(n) + eps);
    case Squash::exp: {
      const T norm = std::sqrt(n + eps);
      return -std::expm1(-norm) / norm;
    }
    case Squash::unit:
      return 1 / std::sqrt(n + eps);
    case Squash::identity:
      return 1;
  }
  return 1;
}

// 2 s_dv df/dn, with s_dv = s . dv: ds = f dv + slope s. Zero at n = 0 for every kind. The order of the products keeps
// every number in range: for |s| = 1e13 the cube of |s| would be infinite in float.
template <class T>
CAPSFAST_HOST_DEVICE inline T radial_slope(Squash kind, T n, T eps, T s_dv) {
  switch (kind) {
    case Squash::paper:
    case Squash::half: {
      const T least = kind == Squash::paper ? T(1) : T(0.5), q = 1 / (least + n);
      return s_dv * q / std::sqrt(n + eps) * (2 * least * q - n / (n + eps));
    }
    case Squash::eps_outside: {
      const T root = std::sqrt(n), q = 1 / (1 + n), p = 1 / (root + eps);
      return s_dv * q * p * (2 * q - root * p);
    }
    case Squash::exp: {
      const T norm = std::sqrt(n + eps);
      return s_dv / norm / norm * ((std::exp(-norm) * norm + std::expm1(-norm)) / norm);
    }
    case Squash::unit: {
      const T root = std::sqrt(n + eps);
      return -(s_dv / root / root / root);
    }
    case Squash::identity:
      return 0;
  }
  return 0;
}

// How an iteration squashes x, its weighted sum plus the bias: v = factor(last, |x|^2) x. Before the last iteration the
// factor includes the sharpness. The next iteration scores with the sum of all v so far or, unless they accumulate,
// with this v alone.
struct Squashing {
  Squash kind = Squash::paper, last = Squash::paper;  // last: of the last iteration
  double eps = 1e-8, sharpness = 1;
  bool accumulate = true;

  template <class T>
  CAPSFAST_HOST_DEVICE T factor(bool is_last, T n) const {
    const T f = radial<T>(is_last ? last : kind, n, T(eps));
    return is_last ? f : T(sharpness) * f;
  }
  // ds = factor dv + slope x, with x_dv = x . dv.
  template <class T>
  CAPSFAST_HOST_DEVICE T slope(bool is_last, T n, T x_dv) const {
    const T of_v = radial_slope<T>(is_last ? last : kind, n, T(eps), x_dv);
    return is_last ? of_v : T(sharpness) * of_v;
  }
};

}  // namespace capsfast
