// Multiply-adds on registers alone: their rate bounds every kernel of this instruction set. A round is one multiply-add
// in each of 12 independent chains, which keep two units with a latency of up to 6 cycles busy.
#pragma once

#include "vec.inl"

template <class T>
T multiply_adds(int64_t rounds) {
  constexpr int kChains = 12;
  using V = Vec<T, kLanes<T>>;
  V chain[kChains];
  for (int n = 0; n < kChains; ++n) chain[n] = broadcast<kLanes<T>>(static_cast<T>(n));
  const V factor = broadcast<kLanes<T>>(static_cast<T>(0.5)), term = broadcast<kLanes<T>>(static_cast<T>(1));
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int n = 0; n < kChains; ++n) chain[n] = chain[n] * factor + term;
  }
  V total = V{};
  for (int n = 0; n < kChains; ++n) total += chain[n];
  return sum<T, kLanes<T>>(total);
}
