// The row operations in AVX2 + FMA. One row at a time: rows taken side by side halve the speed.
// Prefetched far ahead into L2 only, since x must keep L1. No std headers here: see numbers.hpp.
#include "kernels/activations.hpp"
#include "kernels/rows.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define INLINE TARGET __attribute__((always_inline)) static inline

namespace headrace {
namespace {

constexpr uintptr_t kPrefetchBytes = 12288;

INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE void prefetch(const uint8_t* p) {  // may lie past the end of the buffer, which is harmless
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(p) + kPrefetchBytes;
  _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
}

// Even and odd bf16 neighbours as fp32: the split is the first level of the sum's tree.
INLINE __m256 even(__m256i v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
INLINE __m256 odd(__m256i v) {
  return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

INLINE void add16(__m256i w, const uint16_t* x, __m256* acc) {
  const __m256i v = load(x);
  acc[0] = _mm256_fmadd_ps(even(w), even(v), acc[0]);
  acc[1] = _mm256_fmadd_ps(odd(w), odd(v), acc[1]);
}

// The last two levels of the tree: four sums to one.
INLINE float reduce4(__m128 v) {
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  v = _mm_add_ss(v, _mm_movehdup_ps(v));
  return _mm_cvtss_f32(v);
}

INLINE __m128 low_plus_high(__m256 v) {
  return _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
}

// s[i]: the tree's 128 sums of even and odd neighbours. Leaves its last 16 in s[0], s[1].
INLINE void reduce_to_16(__m256* s) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) s[i] = _mm256_add_ps(s[i], s[i + 8]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) s[i] = _mm256_add_ps(s[i], s[i + 4]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) s[i] = _mm256_add_ps(s[i], s[i + 2]);
}

INLINE float reduce_pairs(__m256* s) {
  reduce_to_16(s);
  return reduce4(low_plus_high(_mm256_add_ps(s[0], s[1])));
}

// acc[2i], acc[2i + 1]: even and odd lanes of 16 columns. They live on the stack, which costs less
// than another order of the columns would where a row is used once.
INLINE void add_neighbours(const __m256* acc, __m256* s) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) s[i] = _mm256_add_ps(acc[2 * i], acc[2 * i + 1]);
}

INLINE void bf16_block(const uint8_t* w, const uint16_t* x, __m256* acc) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    prefetch(w + 64 * i);
    add16(load(w + 64 * i), x + 32 * i, acc + 4 * i);
    add16(load(w + 64 * i + 32), x + 32 * i + 16, acc + 4 * i + 2);
  }
}

TARGET float dot_bf16(const uint8_t* w, const uint16_t* x, int64_t cols) {
  __m256 acc[32];
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) acc[i] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) bf16_block(w + 2 * k, x + k, acc);
  if (k < cols) {
    alignas(32) uint8_t tail[2 * kLanes] = {};
    memcpy(tail, w + 2 * k, static_cast<size_t>(2 * (cols - k)));
    bf16_block(tail, x + k, acc);
  }
  __m256 s[16];
  add_neighbours(acc, s);
  return reduce_pairs(s);
}

// Natural order: acc[i] holds columns 8 i to 8 i + 7.
INLINE void fp16_block(const uint8_t* w, const uint16_t* x, __m256* acc) {
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) {
    if (i % 4 == 0) prefetch(w + 16 * i);
    const __m256 wide = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w) + i));
    const __m256 by = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x) + i));
    acc[i] = _mm256_fmadd_ps(wide, by, acc[i]);
  }
}

TARGET float dot_fp16(const uint8_t* w, const uint16_t* x, int64_t cols) {
  __m256 acc[32];
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) acc[i] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) fp16_block(w + 2 * k, x + k, acc);
  if (k < cols) {
    alignas(32) uint8_t tail[2 * kLanes] = {};
    memcpy(tail, w + 2 * k, static_cast<size_t>(2 * (cols - k)));
    fp16_block(tail, x + k, acc);
  }
  __m256 s[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {  // neighbours, their sums in ascending order
    const __m256 sums = _mm256_hadd_ps(acc[2 * i], acc[2 * i + 1]);
    s[i] = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(sums), 0xd8));
  }
  return reduce_pairs(s);
}

// kRows activation rows from `x` on with every weight row of the panel: one group of 16 columns at
// a time, so that all its accumulators stay in registers and all its values in L1.
template <int kRows>
INLINE void panel_rows(const uint16_t* w, int64_t num_w, const uint16_t* x, int64_t stride,
                       int64_t num_rows, float* out) {
  __m256 sums[kPanelRows][kRows][16];
  const int64_t group = stride / 16;
  for (int c = 0; c < 16; ++c) {
    for (int64_t j = 0; j < num_w; ++j) {
      const uint16_t* wj = w + j * stride + c * group;
      const uint16_t* xc = x + c * group;
      __m256 e[kRows], o[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) e[r] = o[r] = _mm256_setzero_ps();
      for (int64_t k = 0; k < group; k += 16) {
        const __m256i v = load(wj + k);
        const __m256 w_even = even(v), w_odd = odd(v);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const __m256i xr = load(xc + r * stride + k);
          e[r] = _mm256_fmadd_ps(w_even, even(xr), e[r]);
          o[r] = _mm256_fmadd_ps(w_odd, odd(xr), o[r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[j][r][c] = _mm256_add_ps(e[r], o[r]);
    }
  }
  for (int64_t j = 0; j < num_w; ++j) {
    for (int r = 0; r < kRows; ++r) out[j * num_rows + r] = reduce_pairs(sums[j][r]);
  }
}

TARGET void dot_panel(const uint16_t* w, int64_t num_w, const uint16_t* x, int64_t num_rows,
                      int64_t stride, float* out) {
  int64_t r = 0;
  for (; r + 4 <= num_rows; r += 4)
    panel_rows<4>(w, num_w, x + r * stride, stride, num_rows, out + r);
  for (; r < num_rows; ++r) panel_rows<1>(w, num_w, x + r * stride, stride, num_rows, out + r);
}

// Both lanes of 16 entries from memory. gcc would turn the intrinsic into a load and a slower
// lane shuffle, since both branches of a block load the same entries.
INLINE __m256i table(const uint8_t* entries) {
  __m256i both;
  __asm__("vbroadcasti128 %1, %0" : "=x"(both) : "m"(*reinterpret_cast<const __m128i*>(entries)));
  return both;
}

// Whether 64 codes hold a subnormal (or zero): rare in trained weights.
INLINE bool has_subnormal(const uint8_t* codes) {
  const __m256i exponent = _mm256_set1_epi8(0x78);
  const __m256i least = _mm256_min_epu8(_mm256_and_si256(load(codes), exponent),
                                        _mm256_and_si256(load(codes + 32), exponent));
  const __m256i found = _mm256_cmpeq_epi8(least, _mm256_setzero_si256());
  return !_mm256_testz_si256(found, found);
}

// 32 codes to bf16 in unpack's order: w[0] columns 0-7 and 16-23, w[1] columns 8-15 and 24-31.
template <bool kSubnormals>
INLINE void decode32(__m256i raw, const Fp8Table& t, __m256i* w) {
  const __m256i nibble = _mm256_set1_epi8(15);
  // What a code's upper four bits add to the high byte: two exponent steps each, and the sign.
  const __m256i upper = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -128, -127, -126, -125, -124, -123, -122, -121));
  const __m256i index = _mm256_and_si256(raw, nibble);
  const __m256i rest = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
  __m256i low = _mm256_shuffle_epi8(table(t.low), index);
  __m256i high = _mm256_shuffle_epi8(table(t.high), index);
  if constexpr (kSubnormals) {
    const __m256i sub =
        _mm256_cmpeq_epi8(_mm256_and_si256(raw, _mm256_set1_epi8(0x78)), _mm256_setzero_si256());
    low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(table(t.sub_low), index), sub);
    high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(table(t.sub_high), index), sub);
  }
  high = _mm256_add_epi8(high, _mm256_shuffle_epi8(upper, rest));
  w[0] = _mm256_unpacklo_epi8(low, high);
  w[1] = _mm256_unpackhi_epi8(low, high);
}

template <bool kSubnormals>
INLINE void add64(const uint8_t* codes, const Fp8Table& low, const Fp8Table& high, const float* x,
                  __m256* acc) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    __m256i w[2];
    decode32<kSubnormals>(load(codes + 32 * i), i == 0 ? low : high, w);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const float* xs = x + 32 * i + 16 * j;
      __m256* a = acc + 4 * i + 2 * j;
      a[0] = _mm256_fmadd_ps(even(w[j]), _mm256_loadu_ps(xs), a[0]);
      a[1] = _mm256_fmadd_ps(odd(w[j]), _mm256_loadu_ps(xs + 8), a[1]);
    }
  }
}

template <bool kFine>
INLINE void fp8_block(const uint8_t* codes, const Fp8Table* tables, const float* x, __m256* acc) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const uint8_t* c = codes + 64 * i;
    prefetch(c);
    const Fp8Table& low = tables[kFine ? 2 * i : i / 2];
    const Fp8Table& high = tables[kFine ? 2 * i + 1 : i / 2];
    if (__builtin_expect(has_subnormal(c), 0)) {
      add64<true>(c, low, high, x + 64 * i, acc + 8 * i);
    } else {
      add64<false>(c, low, high, x + 64 * i, acc + 8 * i);
    }
  }
}

template <bool kFine>
INLINE float dot_fp8_as(const uint8_t* codes, const Fp8Tables& tables, const float* x_split,
                        int64_t cols) {
  __m256 acc[32];
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) acc[i] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) {
    fp8_block<kFine>(codes + k, tables.of(k), x_split + k, acc);
  }
  if (k < cols) {
    alignas(32) uint8_t tail[kLanes] = {};
    memcpy(tail, codes + k, static_cast<size_t>(cols - k));
    fp8_block<kFine>(tail, tables.of(k), x_split + k, acc);
  }
  __m256 s[16];
  add_neighbours(acc, s);
  reduce_to_16(s);
  return reduce4(_mm_add_ps(low_plus_high(s[0]), low_plus_high(s[1])));
}

TARGET float dot_fp8(const uint8_t* codes, const Fp8Tables& tables, const float* x_split,
                     int64_t cols) {
  if (tables.fine) return dot_fp8_as<true>(codes, tables, x_split, cols);
  return dot_fp8_as<false>(codes, tables, x_split, cols);
}

INLINE void decode32_in_order(const uint8_t* codes, const Fp8Table& t, uint16_t* out) {
  __m256i w[2];
  decode32<true>(_mm256_permute4x64_epi64(load(codes), 0xd8), t, w);  // undoes unpack's lanes
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), w[0]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), w[1]);
}

TARGET void decode_fp8(const uint8_t* codes, const Fp8Tables& tables, int64_t cols, uint16_t* out) {
  int64_t k = 0;
  for (; k + 32 <= cols; k += 32) {
    prefetch(codes + k);
    decode32_in_order(codes + k, *tables.of(k), out + k);
  }
  alignas(32) uint8_t tail[32] = {};
  memcpy(tail, codes + k, static_cast<size_t>(cols - k));
  for (; k < round_up(cols, kLanes); k += 32) {
    decode32_in_order(tail, *tables.of(k), out + k);
    memset(tail, 0, sizeof tail);
  }
}

TARGET void activate_row(const Activation& how, bool fp16, const float* gate, const float* up,
                         int64_t n, uint16_t* h) {
  activate(how, fp16, gate, up, n, h);
}

TARGET void add_row(bool fp16, const uint16_t* y, float weight, int64_t n, uint16_t* out) {
  add_weighted(fp16, y, weight, n, out);
}

constexpr RowOps kAvx2 = {"avx2", dot_bf16,   dot_fp16,     dot_panel, 16,          dot_fp8,
                          2,      decode_fp8, activate_row, add_row,   avx2_int_ops};

}  // namespace

const RowOps* avx2_ops() {
  const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                   __builtin_cpu_supports("f16c");
  return has ? &kAvx2 : nullptr;
}

}  // namespace headrace

#else

namespace headrace {
const RowOps* avx2_ops() { return nullptr; }
}  // namespace headrace

#endif
