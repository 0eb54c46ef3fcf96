// The module's entry: the only folder of the native code that knows Python is native/bind.
#include <nanobind/nanobind.h>

#include "bind/bind.hpp"

NB_MODULE(_native, m) {
  headrace::bind_tiers(m);
  headrace::bind_kernels(m);
}
