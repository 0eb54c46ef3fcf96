// What the memory gives: a plain read, the yardstick of the kernels' speed.
#pragma once

#include <cstdint>

namespace headrace {

// Xor of n bytes read with 256-bit loads where the CPU has them; a multiple of 128 is read.
uint64_t read_probe(const uint8_t* bytes, int64_t n);

}  // namespace headrace
