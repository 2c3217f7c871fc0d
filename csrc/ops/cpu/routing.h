// Forward and backward of routing on the CPU. T is the type that sums are formed in.
#pragma once

#include <cstdint>

#include "../routing.h"

namespace capsfast {

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out);
template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out);

}  // namespace capsfast
