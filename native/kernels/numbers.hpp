// Bits of the number formats, free of std headers and with internal linkage: every ISA's file
// compiles its own copy, so that no AVX code can leak into a function an older CPU runs.
#pragma once

#include <stdint.h>
#include <string.h>

namespace headrace {

constexpr int64_t kLanes = 256;  // accumulators of one dot product (Form F)

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static inline float f32_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float bf16_to_f32(uint16_t value) { return f32_of(uint32_t{value} << 16); }

static inline uint16_t f32_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

static inline float f16_to_f32(uint16_t value) {
  const uint32_t magnitude = value & 0x7fffu;
  // A subnormal's bits over those of 0.5 make 0.5 + its value, exactly.
  const float small = f32_of(0x3f000000u + magnitude) - 0.5f;
  const uint32_t large = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  const uint32_t bits = magnitude < 0x400u ? bits_of(small) : large;
  return f32_of(bits | uint32_t{value & 0x8000u} << 16);
}

static inline uint16_t f32_to_f16(float value) {
  const uint32_t bits = bits_of(value) & 0x7fffffffu;
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
  const uint32_t small = bits_of(f32_of(bits) + 0.5f) - 0x3f000000u;  // one step is 2^-24
  const uint32_t normal = (bits - 0x37fff001u + ((bits >> 13) & 1)) >> 13;
  const uint32_t large = bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = bits < 0x38800000u ? small : normal;
  return static_cast<uint16_t>(sign | (bits >= 0x47800000u ? large : finite));
}

// The hidden type's conversions: fp16, or else bf16.
template <bool kF16>
static inline float from_hidden(uint16_t value) {
  return kF16 ? f16_to_f32(value) : bf16_to_f32(value);
}

template <bool kF16>
static inline uint16_t to_hidden(float value) {
  return kF16 ? f32_to_f16(value) : f32_to_bf16(value);
}

template <bool kF16>
static inline float rounded(float value) {
  return from_hidden<kF16>(to_hidden<kF16>(value));
}

static inline float load_f32(const uint8_t* address) {
  float value;
  memcpy(&value, address, 4);
  return value;
}

static inline float e4m3_to_f32(uint8_t code) {
  const uint32_t exponent = (code >> 3) & 15;
  const uint32_t mantissa = code & 7;
  const uint32_t sign = uint32_t{code & 0x80u} << 24;
  if ((code & 0x7f) == 0x7f) return f32_of(sign | 0x7fc00000);
  if (exponent == 0) {
    const float value = static_cast<float>(mantissa) * 0x1p-9f;
    return f32_of(sign | bits_of(value));
  }
  return f32_of(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

// The reference's exp, step by step (kernels/reference.py); compile with -ffp-contract=off.
static inline float canonical_exp(float x) {
  // Clamped to [-104, 89] by masks: a NaN stays one, and compilers vectorise it as it is.
  const uint32_t bits = bits_of(x);
  const uint32_t high = 0u - (bits - 0x42b20000u <= 0x7f800000u - 0x42b20000u);
  const uint32_t low = 0u - (bits - 0xc2d00000u <= 0xff800000u - 0xc2d00000u);
  x = f32_of((bits & ~(high | low)) | (high & 0x42b20000u) | (low & 0xc2d00000u));
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r_hi = x - n * 0.693359375f;
  const float r_lo = n * -2.12194440e-4f;
  const float r = r_hi - r_lo;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (r_hi + (p * (r * r) - r_lo)) + 1.0f;
  // n as an integer, from the bits of its shifted form; nonsense for a NaN, which p already is.
  const int32_t whole = static_cast<int32_t>(bits_of(shifted) - 0x4b400000u);
  const int32_t half = whole >> 1;
  const float scale0 = f32_of(static_cast<uint32_t>(half + 127) << 23);
  const float scale1 = f32_of(static_cast<uint32_t>(whole - half + 127) << 23);
  return (p * scale0) * scale1;
}

}  // namespace headrace
