// Ops whose kernels are plans.
#pragma once

#include "../python.h"

namespace capsfast::plans {

// Adds to the module what capsfast/triton/plan.py needs.
void define(pybind11::module_& m);

}  // namespace capsfast::plans
