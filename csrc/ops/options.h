// Translates the words of the op schemas to enumerators for the kernels. capsfast/options.py lists the same words.
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <string>

#include "routing.h"

namespace capsfast {

template <size_t count>
int choice_of(const char* option, const std::string& word, const char* const (&words)[count]) {
  for (size_t n = 0; n < count; ++n) {
    if (word == words[n]) return static_cast<int>(n);
  }
  STD_TORCH_CHECK(false, "capsfast: ", option, " must not be '", word, "'");
  return 0;
}

inline Normalize normalize_of(const std::string& word) {
  return static_cast<Normalize>(choice_of("normalize", word, {"out", "in", "sigmoid", "none", "lse"}));
}

inline Normalize softmax_of(const std::string& word) {
  return static_cast<Normalize>(choice_of("softmax", word, {"out", "in"}));
}

inline bool gradient_last_of(const std::string& word) { return choice_of("gradient", word, {"full", "last"}) == 1; }

inline Squash squash_of(const std::string& word) {
  return static_cast<Squash>(choice_of("squash", word, {"paper", "half", "eps_outside", "exp", "unit", "identity"}));
}

}  // namespace capsfast
