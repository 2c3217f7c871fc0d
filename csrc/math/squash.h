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

// df/dn; finite at n = 0 for every kind.
template <class T>
CAPSFAST_HOST_DEVICE inline T radial_derivative(Squash kind, T n, T eps) {
  switch (kind) {
    case Squash::paper: {
      const T root = std::sqrt(n + eps), q = 1 / (1 + n);
      return q * q / root - n * q / (2 * root * root * root);
    }
    case Squash::half: {
      const T root = std::sqrt(n + eps), q = 1 / (T(0.5) + n);
      return T(0.5) * q * q / root - n * q / (2 * root * root * root);
    }
    case Squash::eps_outside: {
      const T root = std::sqrt(n), q = 1 / (1 + n), p = 1 / (root + eps);
      return q * q * p - q * root * p * p / 2;
    }
    case Squash::exp: {
      const T norm = std::sqrt(n + eps);
      return (std::exp(-norm) * norm + std::expm1(-norm)) / (2 * norm * norm * norm);
    }
    case Squash::unit: {
      const T root = std::sqrt(n + eps);
      return -1 / (2 * root * root * root);
    }
    case Squash::identity:
      return 0;
  }
  return 0;
}

// How an iteration squashes x, its weighted sum plus the bias: v = factor(last, |x|^2) x.
struct Squashing {
  Squash kind = Squash::paper, last = Squash::paper;  // last: of the last iteration
  double eps = 1e-8;

  template <class T>
  CAPSFAST_HOST_DEVICE T factor(bool is_last, T n) const {
    return radial<T>(is_last ? last : kind, n, T(eps));
  }
  // The derivative of the factor with respect to n.
  template <class T>
  CAPSFAST_HOST_DEVICE T derivative(bool is_last, T n) const {
    return radial_derivative<T>(is_last ? last : kind, n, T(eps));
  }
};

}  // namespace capsfast
