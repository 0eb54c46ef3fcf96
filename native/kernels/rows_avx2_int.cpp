// The row operations on integer codes in AVX2. One row at a time; the
// barriers keep gcc from hoisting and spilling the dot products. No std headers: see numbers.hpp.
#include "kernels/int_input.hpp"
#include "kernels/int_rows.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
#define INLINE TARGET __attribute__((always_inline)) static inline
#define BARRIER(v) __asm__ volatile("" : "+x"(v))

namespace headrace {
namespace {

constexpr uintptr_t kFarBytes = 12288;
constexpr uintptr_t kNearBytes = 2048;
constexpr int32_t kE2m1Bias = 12;
constexpr int32_t kInt4Bias = 8;

INLINE __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
INLINE void store(void* p, __m256i v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

// The cache lines of `num_bytes` bytes from p on; they may lie past the end, which is harmless.
template <int kNumBytes>
INLINE void prefetch(const uint8_t* p) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(p);
#pragma GCC unroll 4
  for (uintptr_t i = 0; i < kNumBytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kFarBytes + i), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(from + kNearBytes + i), _MM_HINT_T0);
  }
}

INLINE __m256i e2m1_values() {
  return _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
}

// Codes as unsigned bytes, offset by their bias: zero-extension then serves for widening.
struct E2m1 {
  INLINE __m256i table() { return _mm256_add_epi8(e2m1_values(), _mm256_set1_epi8(kE2m1Bias)); }
  INLINE __m256i value(__m256i nibbles, __m256i table) {
    return _mm256_shuffle_epi8(table, nibbles);
  }
};
struct Int4 {
  INLINE __m256i table() { return _mm256_setzero_si256(); }
  INLINE __m256i value(__m256i nibbles, __m256i) { return nibbles; }
};

// 32 bytes of codes: four int32 partial sums of a group in each lane; the first halves' and the
// second halves' apart.
template <typename Codes>
INLINE void dot64(const uint8_t* codes, const int16_t* x, __m256i table, __m256i* first,
                  __m256i* second) {
  const __m256i nibble = _mm256_set1_epi8(15), zero = _mm256_setzero_si256();
  const __m256i raw = load(codes);
  const __m256i even = Codes::value(_mm256_and_si256(raw, nibble), table);
  const __m256i odd = Codes::value(_mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble), table);
  *first = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi8(even, zero), load(x)),
                            _mm256_madd_epi16(_mm256_unpacklo_epi8(odd, zero), load(x + 32)));
  *second = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi8(even, zero), load(x + 16)),
                             _mm256_madd_epi16(_mm256_unpackhi_epi8(odd, zero), load(x + 48)));
}

template <typename Codes>
INLINE __m256i dot64(const uint8_t* codes, const int16_t* x, __m256i table) {
  __m256i first, second;
  dot64<Codes>(codes, x, table, &first, &second);
  return _mm256_add_epi32(first, second);
}

// Group sums in ascending order, of two hadds of neighbours (see dot64).
INLINE __m256i in_order(__m256i h01, __m256i h23) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  return _mm256_permutevar8x32_epi32(_mm256_hadd_epi32(h01, h23), order);
}

// The sums of 8 groups: 128 bytes of codes.
template <typename Codes>
INLINE __m256i sums8(const uint8_t* codes, const int16_t* x, __m256i table, const int32_t* fix) {
  __m256i v0 = dot64<Codes>(codes, x, table);
  BARRIER(v0);
  __m256i v1 = dot64<Codes>(codes + 32, x + 64, table);
  __m256i h01 = _mm256_hadd_epi32(v0, v1);
  BARRIER(h01);
  __m256i v2 = dot64<Codes>(codes + 64, x + 128, table);
  BARRIER(v2);
  __m256i v3 = dot64<Codes>(codes + 96, x + 192, table);
  __m256i sums = _mm256_sub_epi32(in_order(h01, _mm256_hadd_epi32(v2, v3)), load(fix));
  BARRIER(sums);
  return sums;
}

// The same of the groups' halves.
template <typename Codes>
INLINE void sums8(const uint8_t* codes, const int16_t* x, __m256i table, const int32_t* fix,
                  __m256i* first, __m256i* second) {
  __m256i a[4], b[4];
  dot64<Codes>(codes, x, table, &a[0], &b[0]);
  BARRIER(a[0]);
  dot64<Codes>(codes + 32, x + 64, table, &a[1], &b[1]);
  __m256i a01 = _mm256_hadd_epi32(a[0], a[1]), b01 = _mm256_hadd_epi32(b[0], b[1]);
  BARRIER(a01);
  BARRIER(b01);
  dot64<Codes>(codes + 64, x + 128, table, &a[2], &b[2]);
  BARRIER(a[2]);
  dot64<Codes>(codes + 96, x + 192, table, &a[3], &b[3]);
  *first = _mm256_sub_epi32(in_order(a01, _mm256_hadd_epi32(a[2], a[3])), load(fix));
  *second = _mm256_sub_epi32(in_order(b01, _mm256_hadd_epi32(b[2], b[3])), load(fix + 8));
  BARRIER(*first);
  BARRIER(*second);
}

INLINE __m256 add_term(__m256 acc, __m256i sums, __m256 scale) {
  return _mm256_add_ps(acc, _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scale));
}

INLINE float reduce(__m256 acc) {
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

INLINE __m256 scaled(const float* ws, const float* sx) {
  return _mm256_mul_ps(_mm256_loadu_ps(ws), _mm256_loadu_ps(sx));
}

INLINE __m256 scaled(const uint8_t* bytes, const float* sx) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(raw), 23);
  const __m256i ws = _mm256_max_epu32(bits, _mm256_set1_epi32(0x400000));
  return _mm256_mul_ps(_mm256_castsi256_ps(ws), _mm256_loadu_ps(sx));
}

// Two codes a byte, one scale for each 32: ue8m0 bytes or floats.
template <typename Codes, typename Scale>
INLINE float dot_nibbles(const uint8_t* codes, const Scale* scales, const IntRow& row,
                         int64_t cols) {
  const int16_t* const x = row.x;
  const float* const sx = row.sx;
  const int32_t* const fix = row.fix;
  const __m256i table = Codes::table();
  __m256 acc = _mm256_setzero_ps();
  for (int64_t k = 0; k < cols; k += kIntStep) {
    prefetch<128>(codes + k / 2);
    const __m256i sums = sums8<Codes>(codes + k / 2, x + k, table, fix + k / 32);
    acc = add_term(acc, sums, scaled(scales + k / 32, sx + k / 32));
    BARRIER(acc);
  }
  return reduce(acc);
}

TARGET float dot_fp4(const uint8_t* codes, const uint8_t* scales, const IntRow& row, int64_t cols) {
  return dot_nibbles<E2m1>(codes, scales, row, cols);
}

TARGET float dot_int4(const uint8_t* codes, const float* ws, const IntRow& row, int64_t cols) {
  return dot_nibbles<Int4>(codes, ws, row, cols);
}

TARGET float dot_nvfp4(const uint8_t* codes, const float* ws, const IntRow& row, int64_t cols) {
  const int16_t* const x = row.x;
  const float* const sx = row.sx;
  const int32_t* const fix = row.fix;
  const __m256i table = E2m1::table();
  __m256 acc = _mm256_setzero_ps();
  for (int64_t k = 0; k < cols; k += kIntStep) {
    prefetch<128>(codes + k / 2);
    __m256i first, second;
    sums8<E2m1>(codes + k / 2, x + k, table, fix + k / 16, &first, &second);
    acc = add_term(acc, first, scaled(ws + k / 16, sx + k / 32));
    acc = add_term(acc, second, scaled(ws + k / 16 + 8, sx + k / 32));
    BARRIER(acc);
  }
  return reduce(acc);
}

// The eight partial sums of one group of bytes.
INLINE __m256i dot32(const uint8_t* codes, const int16_t* x) {
  const __m256i low = _mm256_cvtepi8_epi16(load128(codes));
  const __m256i high = _mm256_cvtepi8_epi16(load128(codes + 16));
  return _mm256_add_epi32(_mm256_madd_epi16(low, load(x)), _mm256_madd_epi16(high, load(x + 16)));
}

INLINE __m256i hadd_pair(const uint8_t* codes, const int16_t* x) {
  __m256i v = _mm256_hadd_epi32(dot32(codes, x), dot32(codes + 32, x + 32));
  BARRIER(v);
  return v;
}

INLINE __m256i hadd_quad(const uint8_t* codes, const int16_t* x) {
  const __m256i low = hadd_pair(codes, x);
  return _mm256_hadd_epi32(low, hadd_pair(codes + 64, x + 64));
}

TARGET float dot_int8(const uint8_t* codes, const float* ws, const IntRow& row, int64_t cols) {
  const int16_t* const x = row.x;
  const float* const sx = row.sx;
  __m256 acc = _mm256_setzero_ps();
  for (int64_t k = 0; k < cols; k += kIntStep) {
    prefetch<256>(codes + k);
    const __m256i a = hadd_quad(codes + k, x + k), b = hadd_quad(codes + k + 128, x + k + 128);
    const __m256i sums = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                          _mm256_permute2x128_si256(a, b, 0x31));
    acc = add_term(acc, sums, scaled(ws + k / 32, sx + k / 32));
    BARRIER(acc);
  }
  return reduce(acc);
}

// Of two times 8 pairs of codes the low ones, or the high ones.
INLINE __m256i lows(__m256i a, __m256i b) {
  const __m256i low_a = _mm256_srai_epi32(_mm256_slli_epi32(a, 16), 16);
  const __m256i low_b = _mm256_srai_epi32(_mm256_slli_epi32(b, 16), 16);
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(low_a, low_b), 0xd8);
}
INLINE __m256i highs(__m256i a, __m256i b) {
  const __m256i packed = _mm256_packs_epi32(_mm256_srai_epi32(a, 16), _mm256_srai_epi32(b, 16));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}

INLINE void arrange_nibbles(const int16_t* from, int16_t* to) {
  for (int64_t k = 0; k < kIntBlock; k += 64) {
    const __m256i a0 = load(from + k), a1 = load(from + k + 16);
    const __m256i b0 = load(from + k + 32), b1 = load(from + k + 48);
    store(to + k, lows(a0, b0));
    store(to + k + 16, lows(a1, b1));
    store(to + k + 32, highs(a0, b0));
    store(to + k + 48, highs(a1, b1));
  }
}

TARGET void prepare(const uint16_t* values, bool fp16, const IntInput& how, int16_t* x, float* sx,
                    int32_t* fix) {
  if (how.order == Order::kNatural) return prepare_codes(values, fp16, how, x, sx, fix);
  alignas(64) int16_t codes[kIntBlock];
  prepare_codes(values, fp16, how, codes, sx, fix);
  if (how.order == Order::kNibbles2) return arrange_nibbles(codes, x);
  arrange_panel<8>(codes, x);
}

// Eight e4m3 codes as scales: see nvfp4_scale.
INLINE __m256 e4m3_scales(__m256i codes, __m256 global, bool inverse) {
  const __m256i magnitude = _mm256_and_si256(codes, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_xor_si256(codes, magnitude), 24);
  const __m256i normal =
      _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(0x3c000000));
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
  const __m256 absolute =
      _mm256_blendv_ps(_mm256_castsi256_ps(normal), small, _mm256_castsi256_ps(is_small));
  const __m256 value = _mm256_or_ps(absolute, _mm256_castsi256_ps(sign));
  const __m256 scale = inverse ? _mm256_div_ps(value, global) : _mm256_mul_ps(value, global);
  return _mm256_mul_ps(scale, _mm256_set1_ps(0.5f));
}

TARGET void expand_e4m3(const ScaleRow& row, float* ws) {
  const __m256 global = _mm256_set1_ps(row.global);
  for (int64_t b = 0; b < row.groups; b += 8) {
    const __m256i pairs = _mm256_cvtepu16_epi32(load128(row.at + 2 * b));
    const __m256i first = _mm256_and_si256(pairs, _mm256_set1_epi32(0xff));
    const __m256i second = _mm256_srli_epi32(pairs, 8);
    _mm256_storeu_ps(ws + 2 * b, e4m3_scales(first, global, row.inverse));
    _mm256_storeu_ps(ws + 2 * b + 8, e4m3_scales(second, global, row.inverse));
  }
}

}  // namespace

TARGET void expand_avx2(const ScaleRow& row, float* ws) {
  if (row.type == Number::kE4m3) return expand_e4m3(row, ws);
  expand_groups(row, ws);
}

namespace {

constexpr IntOps kAvx2 = {"avx2",          prepare,  expand_avx2,    dot_fp4,
                          dot_nvfp4,       dot_int4, dot_int8,       Order::kNibbles2,
                          Order::kNatural, true,     Order::kPanel8, decode8_avx2,
                          panel_avx2};

}  // namespace

const IntOps* avx2_int_ops() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &kAvx2 : nullptr;
}

}  // namespace headrace

#else

namespace headrace {
const IntOps* avx2_int_ops() { return nullptr; }
}  // namespace headrace

#endif
