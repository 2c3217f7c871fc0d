// Forward and backward of a pass on the CPU. T is the type that sums are formed in.
#pragma once

#include "../pass.h"

namespace capsfast {

template <class T>
void pass_forward(const Problem& p, const PassInputs& in, const PassOutputs& out);
template <class T>
void pass_backward(const Problem& p, const PassInputs& in, const PassSaved& saved, const PassGradients& out);

}  // namespace capsfast
