// The headers that the kernels use, for their .inl files and for those who include these.
#pragma once

#include "../../cpu/isa.h"
#include "../../math/half.h"
#include "../../math/softmax.h"
#include "../../math/squash.h"
#include "passes.h"
#include "scratch.h"
