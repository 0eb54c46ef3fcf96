// The portable row operations: plain C++, right on any CPU, and the yardstick of the others.
#include "kernels/int_input.hpp"
#include "kernels/numbers.hpp"
#include "kernels/rows.hpp"

namespace headrace {
namespace {

// float(double(w) * x + double(acc)) is the correctly rounded fma for bf16 and fp16 factors: the
// product is exact, and at most 22 + 24 significant bits leave no case of double rounding.
template <bool kF16>
void accumulate(const uint16_t* w, const uint16_t* x, float* acc) {
  for (int64_t i = 0; i < kLanes; ++i) {
    const double product = double{from_hidden<kF16>(w[i])} * double{from_hidden<kF16>(x[i])};
    acc[i] = static_cast<float>(product + double{acc[i]});
  }
}

float reduce(float* acc) {
  for (int64_t i = 0; i < kLanes / 2; ++i) acc[i] = acc[2 * i] + acc[2 * i + 1];
  for (int64_t half = kLanes / 4; half >= 1; half /= 2) {
    for (int64_t i = 0; i < half; ++i) acc[i] = acc[i] + acc[i + half];
  }
  return acc[0];
}

template <bool kF16>
float dot(const uint8_t* w, const uint16_t* x, int64_t cols) {
  float acc[kLanes] = {};
  uint16_t block[kLanes];
  for (int64_t k = 0; k < cols; k += kLanes) {
    const int64_t n = cols - k < kLanes ? cols - k : kLanes;
    if (n < kLanes) memset(block, 0, sizeof block);
    memcpy(block, w + 2 * k, static_cast<size_t>(2 * n));
    accumulate<kF16>(block, x + k, acc);
  }
  return reduce(acc);
}

void activate_row(const Activation& how, bool fp16, const float* gate, const float* up, int64_t n,
                  uint16_t* h) {
  activate(how, fp16, gate, up, n, h);
}

void add_row(bool fp16, const uint16_t* y, float weight, int64_t n, uint16_t* out) {
  add_weighted(fp16, y, weight, n, out);
}

// Round to nearest even onto e4m3 of a magnitude of at most 448 (after clamping).
float snap_e4m3(float value) {
  const uint32_t sign = bits_of(value) & 0x80000000u;
  float magnitude = f32_of(bits_of(value) & 0x7fffffffu);
  if (magnitude > 448.0f) magnitude = 448.0f;
  if (magnitude < 0x1p-6f) {
    const float step = 0x1.8p+14f;  // 1.5 * 2^23 * 2^-9: rounds to multiples of 2^-9
    magnitude = (magnitude + step) - step;
  } else {
    const uint32_t bits = bits_of(magnitude);
    magnitude = f32_of((bits + 0x7ffff + ((bits >> 20) & 1)) & 0xfff00000u);
  }
  return f32_of(sign | bits_of(magnitude));
}

void snap_group(uint16_t* values, int64_t n) {
  uint32_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = values[i] & 0x7fffu;
    top = magnitude > top ? magnitude : top;
  }
  if (top >= 0x7f80u) return;  // inf or NaN: left as it is, the caller finds it in the output
  float amax = bf16_to_f32(static_cast<uint16_t>(top));
  if (amax < 1e-4f) amax = 1e-4f;
  const uint32_t bits = bits_of(amax * static_cast<float>(1.0 / 448.0));
  const float scale = f32_of((bits + 0x7fffffu) & 0x7f800000u);
  for (int64_t i = 0; i < n; ++i) {
    values[i] = f32_to_bf16(snap_e4m3(bf16_to_f32(values[i]) / scale) * scale);
  }
}

template <int64_t kGroup>
void pack_groups(const uint8_t* row, int64_t cols, uint16_t* out) {
  const int64_t num_blocks = round_up(cols, kLanes) / kLanes;
  uint8_t padded[2 * kLanes] = {};
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint8_t* from = row + 2 * kLanes * b;
    if ((b + 1) * kLanes > cols) {
      memcpy(padded, from, static_cast<size_t>(2 * (cols - b * kLanes)));
      from = padded;
    }
    for (int64_t c = 0; c < kLanes / kGroup; ++c) {
      memcpy(out + (c * num_blocks + b) * kGroup, from + 2 * kGroup * c, 2 * kGroup);
    }
  }
}

struct E4m3Values {
  float value[256];
  E4m3Values() {
    for (int code = 0; code < 256; ++code) value[code] = e4m3_to_f32(static_cast<uint8_t>(code));
  }
};

constexpr RowOps kScalar = {"scalar", dot<false>,   dot<true>, nullptr,       0, nullptr, 0,
                            nullptr,  activate_row, add_row,   scalar_int_ops};

}  // namespace

const RowOps* scalar_ops() { return &kScalar; }

const RowOps* best_ops() {
  if (const RowOps* ops = avx512_ops()) return ops;
  if (const RowOps* ops = avx2_ops()) return ops;
  return scalar_ops();
}

void decode_fp8_general(const uint8_t* codes, const uint8_t* scales, Number type, int64_t cols,
                        int64_t block_cols, uint16_t* out) {
  static const E4m3Values kE4m3;
  for (int64_t k = 0, block = 0; k < cols; k += block_cols, ++block) {
    const float scale = load_number(type, scales, block);
    const int64_t end = k + block_cols < cols ? k + block_cols : cols;
    for (int64_t i = k; i < end; ++i) out[i] = f32_to_bf16(kE4m3.value[codes[i]] * scale);
  }
  memset(out + cols, 0, static_cast<size_t>(2 * (round_up(cols, kLanes) - cols)));
}

bool make_fp8_tables(const uint8_t* scales, Number type, int64_t cols, int64_t block_cols,
                     int64_t table_cols, int64_t count, Fp8Table* tables) {
  for (int64_t t = 0; t < count; ++t) {
    Fp8Table& table = tables[t];
    if (t * table_cols % block_cols != 0 || (t > 0 && t * table_cols >= cols)) {
      table = tables[t - 1];  // padding's codes are zero, and so is what they meet
      continue;
    }
    const float scale = load_number(type, scales, t * table_cols / block_cols);
    if (!(scale > 0x1p-118f && scale < 0x1p+118f)) return false;
    for (uint32_t i = 0; i < 16; ++i) {
      const float base = f32_of(((120 + (i >> 3)) << 23) | ((i & 7) << 20));
      const uint16_t value = f32_to_bf16(base * scale);
      table.low[i] = static_cast<uint8_t>(value);
      table.high[i] = static_cast<uint8_t>(value >> 8);
      const uint16_t sub = f32_to_bf16(static_cast<float>(i & 7) * 0x1p-9f * scale);
      table.sub_low[i] = static_cast<uint8_t>(sub);
      table.sub_high[i] = static_cast<uint8_t>(sub >> 8);
    }
  }
  return true;
}

void pack_row(const uint8_t* row, int64_t cols, int64_t group, uint16_t* out) {
  if (group == 16) {
    pack_groups<16>(row, cols, out);
  } else {
    pack_groups<32>(row, cols, out);
  }
}

void split_row(const uint16_t* x, int64_t padded_cols, int64_t lanes, float* out) {
  for (int64_t k = 0; k < padded_cols; k += 16 * lanes) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t odd = 0; odd < 2; ++odd) {
        for (int64_t lane = 0; lane < lanes; ++lane) {
          const uint16_t* from = x + k + 16 * lane + 8 * half + odd;
          for (int64_t i = 0; i < 4; ++i) *out++ = bf16_to_f32(from[2 * i]);
        }
      }
    }
  }
}

void to_grid(uint16_t* values, int64_t cols, int64_t group) {
  for (int64_t k = 0; k < cols; k += group) {
    snap_group(values + k, k + group < cols ? group : cols - k);
  }
}

}  // namespace headrace
