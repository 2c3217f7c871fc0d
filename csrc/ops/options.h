// Translates the words of the op schemas to what the kernels use. capsfast/options.py lists the same words.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

#include "routing.h"

namespace capsfast {

inline Normalize normalize_of(const std::string& word) {
  constexpr const char* names[] = {"out", "in", "sigmoid", "none", "lse"};
  for (int way = 0; way < 5; ++way) {
    if (word == names[way]) return static_cast<Normalize>(way);
  }
  STD_TORCH_CHECK(false, "capsfast: unknown way to normalize '", word, "'");
  return Normalize::out;
}

inline Normalize softmax_of(const std::string& word) {
  STD_TORCH_CHECK(word == "out" || word == "in", "capsfast: softmax must be 'out' or 'in', got '", word, "'");
  return normalize_of(word);
}

inline bool gradient_last_of(const std::string& word) {
  STD_TORCH_CHECK(word == "full" || word == "last", "capsfast: gradient must be 'full' or 'last', got '", word, "'");
  return word == "last";
}

inline Squash squash_of(const std::string& word) {
  constexpr const char* names[] = {"paper", "half", "eps_outside", "exp", "unit", "identity"};
  for (int kind = 0; kind < 6; ++kind) {
    if (word == names[kind]) return static_cast<Squash>(kind);
  }
  STD_TORCH_CHECK(false, "capsfast: unknown squash '", word, "'");
  return Squash::paper;
}

// Where the last iteration has another squash, it stands behind a slash: "paper/identity".
inline void set_squash(Problem& p, const std::string& words) {
  const size_t slash = words.find('/');
  p.squash = squash_of(words.substr(0, slash));
  p.last_squash = p.squash;
  if (slash == std::string::npos) return;
  STD_TORCH_CHECK(words.substr(slash) == "/identity", "capsfast: squash must be a kind, or one with '/identity', got '",
                  words, "'");
  p.last_squash = Squash::identity;
}

}  // namespace capsfast
