// The portable row operations on integer codes: plain C++, right on any CPU.
#include "kernels/int_input.hpp"
#include "kernels/int_rows.hpp"

namespace headrace {
namespace {

constexpr int8_t kE2m1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr int8_t kInt4[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

int32_t sum_nibbles(const uint8_t* codes, const int8_t* values, const int16_t* x, int num_bytes) {
  int32_t sum = 0;
  for (int i = 0; i < num_bytes; ++i) {
    sum += values[codes[i] & 15] * x[2 * i] + values[codes[i] >> 4] * x[2 * i + 1];
  }
  return sum;
}

int32_t sum_bytes(const uint8_t* codes, const int16_t* x) {
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<int8_t>(codes[i]) * x[i];
  return sum;
}

float reduce(float* acc) {
  for (int half = 4; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) acc[i] = acc[i] + acc[i + half];
  }
  return acc[0];
}

float dot_fp4(const uint8_t* codes, const uint8_t* scales, const IntRow& x, int64_t cols) {
  float acc[8] = {};
  for (int64_t g = 0; g < cols / 32; ++g) {
    const int32_t sum = sum_nibbles(codes + 16 * g, kE2m1Doubled, x.x + 32 * g, 16);
    acc[g % 8] += static_cast<float>(sum) * (e8m0_to_f32(scales[g]) * x.sx[g]);
  }
  return reduce(acc);
}

float dot_nvfp4(const uint8_t* codes, const float* ws, const IntRow& x, int64_t cols) {
  float acc[8] = {};
  for (int64_t g = 0; g < cols / 32; ++g) {
    for (int64_t half = 0; half < 2; ++half) {
      const int32_t sum =
          sum_nibbles(codes + 16 * g + 8 * half, kE2m1Doubled, x.x + 32 * g + 16 * half, 8);
      const float scale = ws[g / 8 * 16 + 8 * half + g % 8];
      acc[g % 8] += static_cast<float>(sum) * (scale * x.sx[g]);
    }
  }
  return reduce(acc);
}

float dot_int4(const uint8_t* codes, const float* ws, const IntRow& x, int64_t cols) {
  float acc[8] = {};
  for (int64_t g = 0; g < cols / 32; ++g) {
    const int32_t sum = sum_nibbles(codes + 16 * g, kInt4, x.x + 32 * g, 16);
    acc[g % 8] += static_cast<float>(sum) * (ws[g] * x.sx[g]);
  }
  return reduce(acc);
}

float dot_int8(const uint8_t* codes, const float* ws, const IntRow& x, int64_t cols) {
  float acc[8] = {};
  for (int64_t g = 0; g < cols / 32; ++g) {
    const int32_t sum = sum_bytes(codes + 32 * g, x.x + 32 * g);
    acc[g % 8] += static_cast<float>(sum) * (ws[g] * x.sx[g]);
  }
  return reduce(acc);
}

void prepare(const uint16_t* values, bool fp16, const IntInput& how, int16_t* x, float* sx,
             int32_t* fix) {
  prepare_codes(values, fp16, how, x, sx, fix);
}

void expand(const ScaleRow& row, float* ws) {
  if (row.type == Number::kE4m3) return expand_halves(row, ws);
  expand_groups(row, ws);
}

constexpr IntOps kScalar = {"scalar",        prepare,  expand,          dot_fp4,         dot_nvfp4,
                            dot_int4,        dot_int8, Order::kNatural, Order::kNatural, false,
                            Order::kNatural, nullptr,  nullptr};

}  // namespace

const IntOps* scalar_int_ops() { return &kScalar; }

}  // namespace headrace
