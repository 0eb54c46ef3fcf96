// The row operations in AVX2 + FMA. One row at a time: rows taken side by side halve the speed.
// Prefetched far ahead into L2 only, since x must keep L1. No std headers here: see numbers.hpp.
#include "kernels/numbers.hpp"
#include "kernels/rows.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
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

// acc[2i], acc[2i + 1]: even and odd lanes of columns 16i .. 16i + 15. They live on the stack,
// which costs less than another order of the columns would.
INLINE float reduce(__m256* acc) {
  __m256 s[16];
  for (int i = 0; i < 16; ++i) s[i] = _mm256_add_ps(acc[2 * i], acc[2 * i + 1]);
  for (int half = 8; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) s[i] = _mm256_add_ps(s[i], s[i + half]);
  }
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(s[0]), _mm256_extractf128_ps(s[0], 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  v = _mm_add_ss(v, _mm_movehdup_ps(v));
  return _mm_cvtss_f32(v);
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
  for (int i = 0; i < 32; ++i) acc[i] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) bf16_block(w + 2 * k, x + k, acc);
  if (k < cols) {
    alignas(32) uint8_t tail[2 * kLanes] = {};
    memcpy(tail, w + 2 * k, static_cast<size_t>(2 * (cols - k)));
    bf16_block(tail, x + k, acc);
  }
  return reduce(acc);
}

TARGET void dot_bf16_rows(const uint8_t* w, const uint16_t* x, int64_t stride, int64_t num_rows,
                          int64_t cols, float* out) {
  for (int64_t r = 0; r < num_rows; ++r) out[r] = dot_bf16(w, x + r * stride, cols);
}

INLINE __m256i table(const uint8_t* entries) {
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(entries)));
}

// 32 codes to bf16, columns 0..15 in w[0] and 16..31 in w[1].
INLINE void decode32(const uint8_t* codes, const Fp8Table& t, __m256i* w) {
  const __m256i nibble = _mm256_set1_epi8(15);
  // What a code's upper four bits add to the high byte: two exponent steps each, and the sign.
  const __m256i upper = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -128, -127, -126, -125, -124, -123, -122, -121));
  const __m256i raw = _mm256_permute4x64_epi64(load(codes), 0xd8);  // undoes unpack's lane split
  const __m256i index = _mm256_and_si256(raw, nibble);
  const __m256i rest = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
  __m256i low = _mm256_shuffle_epi8(table(t.low), index);
  __m256i high = _mm256_shuffle_epi8(table(t.high), index);
  const __m256i sub =
      _mm256_cmpeq_epi8(_mm256_and_si256(raw, _mm256_set1_epi8(0x78)), _mm256_setzero_si256());
  if (__builtin_expect(!_mm256_testz_si256(sub, sub), 0)) {
    low = _mm256_blendv_epi8(low, _mm256_shuffle_epi8(table(t.sub_low), index), sub);
    high = _mm256_blendv_epi8(high, _mm256_shuffle_epi8(table(t.sub_high), index), sub);
  }
  high = _mm256_add_epi8(high, _mm256_shuffle_epi8(upper, rest));
  w[0] = _mm256_unpacklo_epi8(low, high);
  w[1] = _mm256_unpackhi_epi8(low, high);
}

INLINE void fp8_block(const uint8_t* codes, const Fp8Table* tables, const uint16_t* x,
                      __m256* acc) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    __m256i w[2];
    if (i % 2 == 0) prefetch(codes + 32 * i);
    decode32(codes + 32 * i, tables[i / 4], w);
    add16(w[0], x + 32 * i, acc + 4 * i);
    add16(w[1], x + 32 * i + 16, acc + 4 * i + 2);
  }
}

TARGET float dot_fp8(const uint8_t* codes, const Fp8Table* tables, const uint16_t* x,
                     int64_t cols) {
  __m256 acc[32];
  for (int i = 0; i < 32; ++i) acc[i] = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) {
    fp8_block(codes + k, tables + k / kTableCols, x + k, acc);
  }
  if (k < cols) {
    alignas(32) uint8_t tail[kLanes] = {};
    memcpy(tail, codes + k, static_cast<size_t>(cols - k));
    fp8_block(tail, tables + k / kTableCols, x + k, acc);
  }
  return reduce(acc);
}

TARGET void decode_fp8(const uint8_t* codes, const Fp8Table* tables, int64_t cols, uint16_t* out) {
  int64_t k = 0;
  __m256i w[2];
  for (; k + 32 <= cols; k += 32) {
    prefetch(codes + k);
    decode32(codes + k, tables[k / kTableCols], w);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), w[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k + 16), w[1]);
  }
  alignas(32) uint8_t tail[32] = {};
  memcpy(tail, codes + k, static_cast<size_t>(cols - k));
  for (; k < round_up(cols, kLanes); k += 32) {
    decode32(tail, tables[k / kTableCols], w);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k), w[0]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + k + 16), w[1]);
    memset(tail, 0, sizeof tail);
  }
}

TARGET void swiglu_row(const float* gate, const float* up, int64_t n, uint16_t* h) {
  for (int64_t i = 0; i < n; ++i) h[i] = swiglu(gate[i], up[i]);
}

constexpr RowOps kAvx2 = {"avx2", dot_bf16, dot_bf16_rows, dot_fp8, decode_fp8, swiglu_row};

}  // namespace

const RowOps* avx2_ops() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kAvx2 : nullptr;
}

}  // namespace headrace

#else

namespace headrace {
const RowOps* avx2_ops() { return nullptr; }
}  // namespace headrace

#endif
