// pybind11 with Python's own declarations made weak: the library then loads into a process that has the ops and no
// Python.
#pragma once

#define PyAPI_FUNC(type) __attribute__((weak, visibility("default"))) type
#define PyAPI_DATA(type) extern __attribute__((weak, visibility("default"))) type
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
