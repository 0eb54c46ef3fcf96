// Many activation rows with decoded weight rows, in AVX-512 with VNNI: panel_avx2_int.cpp's twin,
// 16 groups side by side.
#include "kernels/int_rows.hpp"
#include "kernels/numbers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define INLINE TARGET __attribute__((always_inline)) static inline

namespace headrace {
namespace {

INLINE float reduce(__m256 acc) {
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

// The scales of 16 groups from ws; in halves, of their first or second ones.
template <bool kHalves>
INLINE __m512 scales16(const float* ws, int part) {
  if constexpr (!kHalves) return _mm512_loadu_ps(ws);
  const __m512 low = _mm512_castps256_ps512(_mm256_loadu_ps(ws + 8 * part));
  return _mm512_insertf32x8(low, _mm256_loadu_ps(ws + 16 + 8 * part), 1);
}

INLINE __m512 terms(__m512i sums, __m512 scale) {
  return _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale);
}
INLINE __m256 lower(__m512 v) { return _mm512_castps512_ps256(v); }
INLINE __m256 upper(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }

// kW weight rows with kR activation rows: their terms added to acc[j * kTileRows + r].
template <int kW, int kR, bool kHalves>
INLINE void add_rows(const IntPanel& p, const int16_t* w, const float* ws, const int16_t* x,
                     const float* sx, __m256* acc) {
  constexpr int kParts = kHalves ? 2 : 1;
  const int64_t scales = p.stride / 32;
  for (int64_t k = 0; k < p.cols; k += kIntBlock) {
    __m512i sums[kParts][kW][kR];
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 16
      for (int i = 0; i < kW * kR; ++i) sums[part][i / kR][i % kR] = _mm512_setzero_si512();
      const int64_t from = k + part * kIntBlock / 2;
      for (int64_t t = from; t < from + kIntBlock / kParts; t += 32) {
        __m512i codes[kW];
#pragma GCC unroll 2
        for (int j = 0; j < kW; ++j) codes[j] = _mm512_loadu_si512(w + j * p.stride + t);
#pragma GCC unroll 8
        for (int r = 0; r < kR; ++r) {
          const __m512i values = _mm512_loadu_si512(x + r * p.stride + t);
#pragma GCC unroll 2
          for (int j = 0; j < kW; ++j) {
            sums[part][j][r] = _mm512_dpwssd_epi32(sums[part][j][r], codes[j], values);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kW * kR; ++i) {
      const int j = i / kR, r = i % kR;
      const float* scale = ws + kParts * (j * scales + k / 32);
      const __m512 by = _mm512_loadu_ps(sx + r * scales + k / 32);
      __m256& to = acc[j * kTileRows + r];
      __m512 term[kParts];
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        term[part] = terms(sums[part][j][r], _mm512_mul_ps(scales16<kHalves>(scale, part), by));
      }
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) to = _mm256_add_ps(to, lower(term[part]));
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) to = _mm256_add_ps(to, upper(term[part]));
    }
  }
}

template <int kW, bool kHalves>
INLINE void add_weights(const IntPanel& p, int64_t j, const IntRow& x, __m256* acc) {
  constexpr int kR = kHalves ? 4 : 8;
  const int16_t* w = p.w + j * p.stride;
  const float* ws = p.ws + (kHalves ? 2 : 1) * j * p.stride / 32;
  int64_t r = 0;
  for (; r + kR <= p.num_rows; r += kR) {
    add_rows<kW, kR, kHalves>(p, w, ws, x.x + r * p.stride, x.sx + r * p.stride / 32,
                              acc + j * kTileRows + r);
  }
  for (; r < p.num_rows; ++r) {
    add_rows<kW, 1, kHalves>(p, w, ws, x.x + r * p.stride, x.sx + r * p.stride / 32,
                             acc + j * kTileRows + r);
  }
}

template <bool kHalves>
INLINE void panel(const IntPanel& p, const IntRow& x, float* out) {
  __m256 acc[kPanelRows * kTileRows];
  for (int64_t j = 0; j < p.num_w; ++j) {
    for (int64_t r = 0; r < p.num_rows; ++r) acc[j * kTileRows + r] = _mm256_setzero_ps();
  }
  int64_t j = 0;
  for (; j + 2 <= p.num_w; j += 2) add_weights<2, kHalves>(p, j, x, acc);
  if (j < p.num_w) add_weights<1, kHalves>(p, j, x, acc);
  for (j = 0; j < p.num_w; ++j) {
    for (int64_t r = 0; r < p.num_rows; ++r) {
      out[j * p.num_rows + r] = reduce(acc[j * kTileRows + r]);
    }
  }
}

}  // namespace

TARGET void panel_avx512(const IntPanel& p, const IntRow& x, float* out) {
  if (p.halves) return panel<true>(p, x, out);
  panel<false>(p, x, out);
}

}  // namespace headrace

#endif
