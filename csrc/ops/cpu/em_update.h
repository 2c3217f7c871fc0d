// What EM routing does between two passes (Hinton, Sabour, Frosst 2018, procedure 1): moments of the votes to the
// Gaussian of every output capsule, its activation, and what the next pass scores votes by.
//
// About the center, with n = 1 / mass where there is mass and 0 elsewhere:
//   shift = first n      m = center + shift      variance = max(0, second n - shift^2) + floor
// momentum moves m towards the pose before, and the variance is about the m that results. With V of a component:
//   log sigma = sum_d log(V_d) / 2      cost = mass scale (sum_d beta_u_d [+ log sigma])
//   logit = inverse_temperature (beta_a - cost)
// a is its sigmoid or softmax over j. score is a in the final iteration; before, it is the prior of the next pass,
// log a - log sigma - D log(2 pi) / 2.
//
// Plain loops: they are short beside a pass, which goes over I times as many numbers.
#pragma once

#include <cstdint>

#include "../routing.h"

namespace capsfast {

struct EmProblem {
  int64_t B = 0, J = 0, D = 0;
  double floor = 1, momentum = 0, inverse_temperature = 1;
  double cost_scale = 1;  // 0 (or less): 1 / mean of mass over the output capsules that are there
  bool isotropic = false;
  bool cost_of_variance = true;  // log sigma has a part in the cost
  bool softmax = false;
  bool final = false;
  bool component_beta = false;  // beta_u is [J, D]
  MaskView out_mask;            // [B, J]

  int64_t there(int64_t b) const {
    int64_t count = out_mask.data == nullptr ? J : 0;
    for (int64_t j = 0; j < J && out_mask.data != nullptr; ++j) count += out_mask.at(b, j);
    return count;
  }
};

// Contiguous, as all that follows.
template <class T>
struct EmInputs {
  const T* mass;             // [B, J]
  const T *first, *second;   // [B, J, D]
  const T *center, *last;    // [B, J, D]; last is null for poses 0 before
  const T *beta_a, *beta_u;  // [J]; [J] or [J, D]
};

template <class T>
struct EmOutputs {
  T* poses;      // [B, J, D]
  T* precision;  // [B, J, D], null in the final iteration
  T* score;      // [B, J]
};

// Null where a gradient is not wanted, or was not given.
template <class T>
struct EmGradients {
  const T *dposes, *dprecision, *dscore;
  T *dmass, *dfirst, *dsecond, *dcenter, *dlast, *dbeta_a, *dbeta_u;
};

template <class T>
void em_update(const EmProblem& p, const EmInputs<T>& in, const EmOutputs<T>& out);

template <class T>
void em_update_backward(const EmProblem& p, const EmInputs<T>& in, const EmGradients<T>& gradients);

}  // namespace capsfast
