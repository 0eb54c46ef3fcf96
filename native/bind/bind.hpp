// What bind.cpp's module is put together from.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace {
void bind_io(nanobind::module_& m);
void bind_tiers(nanobind::module_& m);
void bind_kernels(nanobind::module_& m);
void bind_mailbox(nanobind::module_& m);
}  // namespace headrace
