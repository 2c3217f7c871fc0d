// Forward and backward of routing on the CPU: the passes, what happens between them, and the tasks.
#pragma once

#include <cstdint>

#include "../routing.h"

namespace capsfast {

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out);
template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out);

}  // namespace capsfast
