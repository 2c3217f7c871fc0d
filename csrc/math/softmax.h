// When one coupling coefficient of a softmax has all of the coupling.
#pragma once

#include <limits>

namespace capsfast {

// A coefficient above this is 1 but for rounding. In db = c (dc - sum c dc) the sum then is dc, so db is 0. The difference
// of two rounded numbers would be some 1e-7 of dc instead, and an optimizer that divides by the size of gradients, such
// as Adam, makes steps of it.
template <class T>
inline constexpr T kWhole = T(1) - 2 * std::numeric_limits<T>::epsilon();

}  // namespace capsfast
