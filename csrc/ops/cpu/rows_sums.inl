// Sums over a chunk of input capsules in the rows layout, and how they join the sums of a pass.
#pragma once

#include "../../cpu/vec.inl"
#include "kernel.h"

// B_: Rows or Keys, the building blocks.
template <class T, class B_>
struct RowsSums {
  static constexpr int L = B_::L;

  template <class Pass>
  static void clear(const Pass& pass, const RowsScratch<T>& at) {
    const int64_t J = pass.problem->J, sums = J * B_::sum_pitch(pass.problem->D);
    __builtin_memset(at.sum, 0, static_cast<size_t>(sums) * sizeof(T));
    if (pass.mass.high != nullptr) __builtin_memset(at.mass, 0, static_cast<size_t>(J * L) * sizeof(T));
    if (pass.second.high != nullptr) __builtin_memset(at.second, 0, static_cast<size_t>(sums) * sizeof(T));
  }

  // Adds `count` votes of a block, weighted by e [J][L].
  template <class Pass>
  static void add(const Pass& pass, const RowsScratch<T>& at, const typename B_::Votes& votes, int64_t count,
                  const T* center, const T* e) {
    const int64_t J = pass.problem->J;
    T* const second = pass.second.high == nullptr ? nullptr : at.second;
    if (pass.first.high != nullptr) B_::add_scaled(e, votes, count, center, J, pass.problem->D, at.sum, second);
    if (pass.mass.high != nullptr) B_::add(e, J, at.mass);
  }

  // Adds the sums of a chunk to the sums of sample b.
  template <class Pass>
  static void join(const Pass& pass, const RowsScratch<T>& at, int64_t b) {
    const int64_t J = pass.problem->J, D = pass.problem->D, to = b * J * D;
    if (pass.first.high != nullptr) B_::join_rows(at.sum, J, D, pass.first.high + to, pass.first.low + to);
    if (pass.second.high != nullptr) B_::join_rows(at.second, J, D, pass.second.high + to, pass.second.low + to);
    for (int64_t j = 0; j < J && pass.mass.high != nullptr; ++j) {
      const T mass = sum<T, L>(load<L>(at.mass + j * L));
      B_::join(&mass, 1, pass.mass.high + b * J + j, pass.mass.low + b * J + j);
    }
  }
};
