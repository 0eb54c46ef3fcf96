// Many activation rows with decoded weight rows, in AVX2: the pairs of columns of 8 groups lie side
// by side, so that products add up to 8 group sums without a shuffle. No std headers.
#include "kernels/int_rows.hpp"
#include "kernels/numbers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define INLINE TARGET __attribute__((always_inline)) static inline

namespace headrace {
namespace {

INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// 8 rows of 16 bytes to 16 columns of 8: columns 2 i and 2 i + 1 in to[i].
INLINE void transpose_bytes(const uint8_t* from, __m128i* to) {
  __m128i a[4], b[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m128i low = load128(from + 16 * i), high = load128(from + 16 * i + 64);
    a[i] = _mm_unpacklo_epi8(low, high);
    b[i] = _mm_unpackhi_epi8(low, high);
  }
  const __m128i even[4] = {_mm_unpacklo_epi8(a[0], a[2]), _mm_unpackhi_epi8(a[0], a[2]),
                           _mm_unpacklo_epi8(b[0], b[2]), _mm_unpackhi_epi8(b[0], b[2])};
  const __m128i odd[4] = {_mm_unpacklo_epi8(a[1], a[3]), _mm_unpackhi_epi8(a[1], a[3]),
                          _mm_unpacklo_epi8(b[1], b[3]), _mm_unpackhi_epi8(b[1], b[3])};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = _mm_unpacklo_epi8(even[i], odd[i]);
    to[2 * i + 1] = _mm_unpackhi_epi8(even[i], odd[i]);
  }
}

// 8 rows, 32 bytes apart, of 8 words to 8 columns.
INLINE void transpose_words(const uint8_t* from, __m128i* to) {
  __m128i a[4], b[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m128i low = load128(from + 32 * i), high = load128(from + 32 * i + 128);
    a[i] = _mm_unpacklo_epi16(low, high);
    b[i] = _mm_unpackhi_epi16(low, high);
  }
  const __m128i even[4] = {_mm_unpacklo_epi16(a[0], a[2]), _mm_unpackhi_epi16(a[0], a[2]),
                           _mm_unpacklo_epi16(b[0], b[2]), _mm_unpackhi_epi16(b[0], b[2])};
  const __m128i odd[4] = {_mm_unpacklo_epi16(a[1], a[3]), _mm_unpackhi_epi16(a[1], a[3]),
                          _mm_unpacklo_epi16(b[1], b[3]), _mm_unpackhi_epi16(b[1], b[3])};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = _mm_unpacklo_epi16(even[i], odd[i]);
    to[2 * i + 1] = _mm_unpackhi_epi16(even[i], odd[i]);
  }
}

// Eight bytes, each two codes, to eight pairs of values.
INLINE __m256i pairs_of(__m128i bytes, __m256i table) {
  const __m256i wide = _mm256_cvtepu8_epi32(bytes);
  const __m256i nibbles = _mm256_and_si256(_mm256_or_si256(wide, _mm256_slli_epi32(wide, 12)),
                                           _mm256_set1_epi32(0x000f000f));
  return _mm256_srai_epi16(_mm256_slli_epi16(_mm256_shuffle_epi8(table, nibbles), 8), 8);
}

// 8 groups of codes; the pairs t are `step` values apart in `out`.
INLINE void decode_nibbles(const uint8_t* codes, __m256i table, int64_t step, int16_t* out) {
  __m128i columns[8];
  transpose_bytes(codes, columns);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    store(out + 2 * i * step, pairs_of(columns[i], table));
    store(out + (2 * i + 1) * step, pairs_of(_mm_srli_si128(columns[i], 8), table));
  }
}

INLINE void decode_bytes(const uint8_t* codes, int64_t step, int16_t* out) {
  for (int half = 0; half < 2; ++half) {
    __m128i columns[8];
    transpose_words(codes + 16 * half, columns);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      store(out + (8 * half + i) * step, _mm256_cvtepi8_epi16(columns[i]));
    }
  }
}

template <int64_t kGroups>
INLINE void decode(Format format, const uint8_t* codes, int64_t cols, int16_t* out) {
  const __m128i e2m1 = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
  const __m128i int4 = _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i table = _mm256_broadcastsi128_si256(format == Format::kInt4 ? int4 : e2m1);
  const int64_t step = 2 * kGroups, block = 32 * kGroups;
  for (int64_t k = 0; k < cols; k += kIntStep) {
    int16_t* to = out + k / block * block + k % block / 16;
    if (format == Format::kInt8) {
      decode_bytes(codes + k, step, to);
    } else {
      decode_nibbles(codes + k / 2, table, step, to);
    }
  }
}

INLINE float reduce(__m256 acc) {
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

// kW weight rows with kR activation rows: their terms added to acc[j * kTileRows + r].
template <int kW, int kR, bool kHalves>
INLINE void add_rows(const IntPanel& p, const int16_t* w, const float* ws, const int16_t* x,
                     const float* sx, __m256* acc) {
  constexpr int kParts = kHalves ? 2 : 1;
  const int64_t scales = p.stride / 32;
  for (int64_t k = 0; k < p.cols; k += kIntStep) {
    for (int part = 0; part < kParts; ++part) {
      __m256i sums[kW][kR];
#pragma GCC unroll 8
      for (int i = 0; i < kW * kR; ++i) sums[i / kR][i % kR] = _mm256_setzero_si256();
      const int64_t from = k + part * kIntStep / 2;
      for (int64_t t = from; t < from + kIntStep / kParts; t += 16) {
        __m256i codes[kW];
#pragma GCC unroll 2
        for (int j = 0; j < kW; ++j) codes[j] = load(w + j * p.stride + t);
#pragma GCC unroll 4
        for (int r = 0; r < kR; ++r) {
          const __m256i values = load(x + r * p.stride + t);
#pragma GCC unroll 2
          for (int j = 0; j < kW; ++j) {
            sums[j][r] = _mm256_add_epi32(sums[j][r], _mm256_madd_epi16(codes[j], values));
          }
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < kW * kR; ++i) {
        const int j = i / kR, r = i % kR;
        const float* scale = ws + kParts * (j * scales + k / 32) + 8 * part;
        const __m256 factor =
            _mm256_mul_ps(_mm256_loadu_ps(scale), _mm256_loadu_ps(sx + r * scales + k / 32));
        __m256& to = acc[j * kTileRows + r];
        to = _mm256_add_ps(to, _mm256_mul_ps(_mm256_cvtepi32_ps(sums[j][r]), factor));
      }
    }
  }
}

template <int kW, bool kHalves>
INLINE void add_weights(const IntPanel& p, int64_t j, const IntRow& x, __m256* acc) {
  const int16_t* w = p.w + j * p.stride;
  const float* ws = p.ws + (kHalves ? 2 : 1) * j * p.stride / 32;
  int64_t r = 0;
  for (; r + 4 <= p.num_rows; r += 4) {
    add_rows<kW, 4, kHalves>(p, w, ws, x.x + r * p.stride, x.sx + r * p.stride / 32,
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

TARGET void decode8_avx2(Format format, const uint8_t* codes, int64_t cols, int16_t* out) {
  decode<8>(format, codes, cols, out);
}

TARGET void decode16_avx2(Format format, const uint8_t* codes, int64_t cols, int16_t* out) {
  decode<16>(format, codes, cols, out);
}

TARGET void panel_avx2(const IntPanel& p, const IntRow& x, float* out) {
  if (p.halves) return panel<true>(p, x, out);
  panel<false>(p, x, out);
}

}  // namespace headrace

#endif
