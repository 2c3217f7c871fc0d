// Forward and backward of routing and of a pass on the CPU. T is the type that sums are formed in.
#pragma once

#include "../pass.h"
#include "../routing.h"

namespace capsfast {

template <class T>
void routing_forward(const Problem& p, const ForwardOutputs& out);
template <class T>
void routing_backward(const Problem& p, const BackwardInputs& in, const BackwardOutputs& out);
template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out);
template <class T>
void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out);

}  // namespace capsfast
