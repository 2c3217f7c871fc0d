// The headers that the kernels use, for the .inl files and for the files that include them.
#pragma once

#include "../../cpu/isa.h"
#include "../../math/half.h"
#include "../../math/softmax.h"
#include "../../math/squash.h"
#include "passes.h"
#include "scratch.h"
