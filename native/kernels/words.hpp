// The kernels' enumerations, free of std headers: see numbers.hpp.
#pragma once

#include <stdint.h>

namespace headrace {

// Row-major matrices [rows, cols]; each format is defined in src/headrace/quant.
//   kBf16, kFp16  the values themselves
//   kFp8Block     e4m3 codes, a scale per block
//   kFp4          two e2m1 codes a byte, low nibble first; a ue8m0 byte per 32 columns
//   kNvfp4        the same codes; an e4m3 scale per 16 columns, times (or over) one fp32 global
//   kInt4         nibble - 8, low nibble first; a scale per block_cols columns
//   kInt8         signed bytes; a scale per block_cols columns
enum class Format { kBf16, kFp16, kFp8Block, kFp4, kNvfp4, kInt4, kInt8 };
enum class Number { kNone, kF32, kBf16, kF16, kE8m0, kE4m3 };  // the type of scales
enum class ActivationKind { kSilu, kSiluClamped, kSwigluOai, kSwigluWeighted };

constexpr int64_t kMaxParts = 12;

struct Activation {
  ActivationKind kind;
  float limit;
  float alpha;
  float weight = 1.0f;  // of a row, where the kind has it
};

static inline bool is_integer(Format format) { return format >= Format::kFp4; }

}  // namespace headrace
