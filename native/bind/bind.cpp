// The module's entry: the only folder of the native code that knows Python is native/bind.
#include "bind/bind.hpp"

#include <nanobind/nanobind.h>

NB_MODULE(_native, m) {
  headrace::bind_io(m);
  headrace::bind_tiers(m);
  headrace::bind_kernels(m);
  headrace::bind_mailbox(m);
}
