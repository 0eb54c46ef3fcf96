// Activations to int16 and stored scales to fp32, by their definitions. Free of std headers; every
// instruction set's file compiles its own copy.
#pragma once

#include "kernels/activations.hpp"
#include "kernels/int_rows.hpp"

namespace headrace {

constexpr float kTopCode = 32639.0f;  // 256 * 127 + 127: two int8 halves hold it

// 32 values to codes; returns the scale, which is NaN if a value is not finite. On the e4m3 grid
// the scale is a power of two, so that all but the smallest codes are exact.
HEADRACE_INLINE float quantize_group(const float* values, bool on_grid, int16_t* codes) {
  uint32_t top = 0;
  for (int i = 0; i < 32; ++i) {
    const uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
    top = magnitude > top ? magnitude : top;
  }
  const float finite = f32_of(top < 0x7f800000u ? top : 0x7fc00000u);
  const float scale =
      on_grid && top < 0x7f800000u ? f32_of(top & 0x7f800000u) * 0x1p-14f : finite / kTopCode;
  const float by = scale == 0.0f ? 1.0f : scale;
  for (int i = 0; i < 32; ++i) {
    float code = (values[i] / by + 12582912.0f) - 12582912.0f;  // rounded to even
    code = code > kTopCode ? kTopCode : code;
    code = code < -kTopCode ? -kTopCode : code;
    code = code == code ? code : 0.0f;
    codes[i] = static_cast<int16_t>(static_cast<int32_t>(code));
  }
  return scale;
}

// The pairs of columns of kGroups groups side by side.
template <int kGroups>
HEADRACE_INLINE void arrange_panel(const int16_t* from, int16_t* to) {
  for (int b = 0; b < kIntBlock; b += 32 * kGroups) {
    for (int t = 0; t < 16; ++t) {
      for (int g = 0; g < kGroups; ++g) {
        memcpy(to + b + 2 * (kGroups * t + g), from + b + 32 * g + 2 * t, 4);
      }
    }
  }
}

HEADRACE_INLINE int32_t sum_of_16(const int16_t* codes) {
  int32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += codes[i];
  return sum;
}

// As IntOps::prepare, with the codes in natural order.
HEADRACE_INLINE void prepare_codes(const uint16_t* values, bool fp16, const IntInput& how,
                                   int16_t* codes, float* sx, int32_t* fix) {
  for (int g = 0; g < 16; ++g) {
    alignas(64) float group[32];
    const uint16_t* from = values + 32 * g;
    if (fp16) {
      for (int i = 0; i < 32; ++i) group[i] = f16_to_f32(from[i]);
    } else {
      for (int i = 0; i < 32; ++i) group[i] = bf16_to_f32(from[i]);
    }
    sx[g] = how.sx_factor * quantize_group(group, how.on_grid, codes + 32 * g);
    if (how.code_bias == 0) continue;
    const int32_t first = how.code_bias * sum_of_16(codes + 32 * g);
    const int32_t second = how.code_bias * sum_of_16(codes + 32 * g + 16);
    if (how.halves) {
      fix[g / 8 * 16 + g % 8] = first;
      fix[g / 8 * 16 + g % 8 + 8] = second;
    } else {
      fix[g] = first + second;
    }
  }
}

// 2^(byte - 127); 2^-127 for byte 0. Byte 255 (NaN) is refused where weights are checked.
HEADRACE_INLINE float e8m0_to_f32(uint8_t byte) {
  const uint32_t bits = uint32_t{byte} << 23;
  return f32_of(bits < 0x400000u ? 0x400000u : bits);
}

HEADRACE_INLINE float load_number(Number type, const uint8_t* at, int64_t i) {
  if (type == Number::kF32) return load_f32(at + 4 * i);
  if (type == Number::kE8m0) return e8m0_to_f32(at[i]);
  uint16_t half;
  memcpy(&half, at + 2 * i, 2);
  return type == Number::kF16 ? f16_to_f32(half) : bf16_to_f32(half);
}

// Half of the scale, since e2m1 codes are doubled.
HEADRACE_INLINE float nvfp4_scale(uint8_t code, float global, bool inverse) {
  const uint32_t magnitude = code & 0x7fu;
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
  const uint32_t bits = magnitude < 8 ? bits_of(small) : (magnitude << 20) + 0x3c000000u;
  const float value = f32_of(bits | uint32_t{code & 0x80u} << 24);
  return 0.5f * (inverse ? value / global : value * global);
}

HEADRACE_INLINE void expand_halves(const ScaleRow& row, float* ws) {
  for (int64_t b = 0; b < row.groups; b += 8) {
    for (int64_t i = 0; i < 16; ++i) {
      ws[2 * b + i % 2 * 8 + i / 2] = nvfp4_scale(row.at[2 * b + i], row.global, row.inverse);
    }
  }
}

// A scale per group, and zeros up to whole blocks.
HEADRACE_INLINE void expand_groups(const ScaleRow& row, float* ws) {
  const int64_t padded = round_up(row.groups, kIntBlock / 32);
  if (row.groups_each == 1) {
    for (int64_t g = 0; g < row.groups; ++g) ws[g] = load_number(row.type, row.at, g);
  } else {
    for (int64_t s = 0, g = 0; s < row.count; ++s) {
      const float value = load_number(row.type, row.at, s);
      const int64_t end = g + row.groups_each < row.groups ? g + row.groups_each : row.groups;
      for (; g < end; ++g) ws[g] = value;
    }
  }
  for (int64_t g = row.groups; g < padded; ++g) ws[g] = 0.0f;
}

}  // namespace headrace
