// The limit from which one coefficient of a softmax counts as the whole coupling.
#pragma once

#include <limits>

namespace capsfast {

// A coefficient above this is 1 up to rounding. Then in db = c (dc - sum c dc) the sum is dc, and db is 0. Computed,
// the difference would be about 1e-7 of dc, and an optimizer that divides by the size of gradients, such as Adam, would
// make whole steps of it.
template <class T>
inline constexpr T kWhole = T(1) - 2 * std::numeric_limits<T>::epsilon();

}  // namespace capsfast
