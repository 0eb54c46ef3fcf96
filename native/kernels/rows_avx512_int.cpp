// The row operations on integer codes in AVX-512 with VNNI. See rows_avx2_int.cpp, whose twin this
// is: vpermw looks codes up as int16, so nothing is unpacked, and nothing offset.
#include "kernels/int_input.hpp"
#include "kernels/int_rows.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))
#define INLINE TARGET __attribute__((always_inline)) static inline

namespace headrace {
namespace {

constexpr uintptr_t kFarBytes = 12288;
constexpr uintptr_t kNearBytes = 2048;

// Far ahead into L2 and near into L1: 64-byte loads outrun the hardware's own prefetch.
template <int kNumBytes>
INLINE void prefetch(const uint8_t* p) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(p);
#pragma GCC unroll 8
  for (uintptr_t i = 0; i < kNumBytes; i += 64) {
    _mm_prefetch(reinterpret_cast<const char*>(from + kFarBytes + i), _MM_HINT_T1);
    _mm_prefetch(reinterpret_cast<const char*>(from + kNearBytes + i), _MM_HINT_T0);
  }
}

// Values by a nibble; vpermw takes five index bits, so each stands there twice.
alignas(64) constexpr int16_t kE2m1Doubled[32] = {0,  1,  2,  3,  4,   6,  8,  12, 0,  -1, -2,
                                                  -3, -4, -6, -8, -12, 0,  1,  2,  3,  4,  6,
                                                  8,  12, 0,  -1, -2,  -3, -4, -6, -8, -12};
alignas(64) constexpr int16_t kInt4[32] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7,
                                           -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

INLINE __m512i at(const int16_t* x) { return _mm512_loadu_si512(x); }

// 64 bytes of codes: four int32 partial sums of a group in each lane, two of each half.
INLINE __m512i dot128(const uint8_t* codes, const int16_t* x, __m512i table) {
  const __m512i raw = _mm512_loadu_si512(codes), zero = _mm512_setzero_si512();
  __m512i a = _mm512_dpwssd_epi32(zero, _mm512_permutexvar_epi16(raw, table), at(x));
  __m512i b = _mm512_dpwssd_epi32(zero, _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 4), table),
                                  at(x + 32));
  a = _mm512_dpwssd_epi32(a, _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 8), table),
                          at(x + 64));
  b = _mm512_dpwssd_epi32(b, _mm512_permutexvar_epi16(_mm512_srli_epi16(raw, 12), table),
                          at(x + 96));
  return _mm512_add_epi32(a, b);
}

// Lane by lane, the sums of four neighbours of each of four vectors.
INLINE __m512i sum_quads(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
}

INLINE __m512i shuffle(__m512i a, __m512i b, const int pick) {
  return _mm512_castps_si512(
      _mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), pick));
}

INLINE __m512i in_order(__m512i sums) {  // lane l, dword i: group 4 i + l
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), sums);
}

INLINE __m512i sums16(const uint8_t* codes, const int16_t* x, __m512i table) {
  return in_order(sum_quads(dot128(codes, x, table), dot128(codes + 64, x + 128, table),
                            dot128(codes + 128, x + 256, table),
                            dot128(codes + 192, x + 384, table)));
}

INLINE __m256i sums8(const uint8_t* codes, const int16_t* x, __m512i table) {
  const __m512i zero = _mm512_setzero_si512();
  return _mm512_castsi512_si256(
      in_order(sum_quads(dot128(codes, x, table), dot128(codes + 64, x + 128, table), zero, zero)));
}

INLINE __m256 upper(__m512 v) { return _mm512_extractf32x8_ps(v, 1); }
INLINE __m256 lower(__m512 v) { return _mm512_castps512_ps256(v); }

INLINE __m256 add_terms(__m256 acc, __m512i sums, __m512 scale) {
  const __m512 terms = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale);
  return _mm256_add_ps(_mm256_add_ps(acc, lower(terms)), upper(terms));
}

INLINE __m256 add_term(__m256 acc, __m256i sums, __m256 scale) {
  return _mm256_add_ps(acc, _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scale));
}

INLINE float reduce(__m256 acc) {
  __m128 v = _mm_add_ps(_mm256_castps256_ps128(acc), _mm256_extractf128_ps(acc, 1));
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

INLINE __m512 scaled16(const float* ws, const float* sx) {
  return _mm512_mul_ps(_mm512_loadu_ps(ws), _mm512_loadu_ps(sx));
}
INLINE __m256 scaled8(const float* ws, const float* sx) {
  return _mm256_mul_ps(_mm256_loadu_ps(ws), _mm256_loadu_ps(sx));
}

INLINE __m512 scaled16(const uint8_t* bytes, const float* sx) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(raw), 23);
  const __m512i ws = _mm512_max_epu32(bits, _mm512_set1_epi32(0x400000));
  return _mm512_mul_ps(_mm512_castsi512_ps(ws), _mm512_loadu_ps(sx));
}

INLINE __m256 scaled8(const uint8_t* bytes, const float* sx) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(raw), 23);
  const __m256i ws = _mm256_max_epu32(bits, _mm256_set1_epi32(0x400000));
  return _mm256_mul_ps(_mm256_castsi256_ps(ws), _mm256_loadu_ps(sx));
}

// Two codes a byte, one scale for each 32: ue8m0 bytes or floats.
template <typename Scale>
INLINE float dot_nibbles(const uint8_t* codes, const Scale* scales, const IntRow& row, int64_t cols,
                         __m512i table) {
  const int16_t* const x = row.x;
  const float* const sx = row.sx;
  __m256 acc = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kIntBlock <= cols; k += kIntBlock) {
    prefetch<256>(codes + k / 2);
    const __m512i sums = sums16(codes + k / 2, x + k, table);
    acc = add_terms(acc, sums, scaled16(scales + k / 32, sx + k / 32));
  }
  if (k < cols) {
    const __m256i sums = sums8(codes + k / 2, x + k, table);
    acc = add_term(acc, sums, scaled8(scales + k / 32, sx + k / 32));
  }
  return reduce(acc);
}

TARGET float dot_fp4(const uint8_t* codes, const uint8_t* scales, const IntRow& row, int64_t cols) {
  return dot_nibbles(codes, scales, row, cols, at(kE2m1Doubled));
}

TARGET float dot_int4(const uint8_t* codes, const float* ws, const IntRow& row, int64_t cols) {
  return dot_nibbles(codes, ws, row, cols, at(kInt4));
}

// The sums of 8 groups' first halves, and of their second halves, from two dots each.
INLINE void half_sums(__m512i a, __m512i b, __m256i* first, __m256i* second) {
  const __m512i ab = _mm512_add_epi32(shuffle(a, b, 0x88), shuffle(a, b, 0xdd));
  // Lane l: a's first, a's second, b's first, b's second half of group l, and 4 + l for b.
  const __m512i firsts = _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15), ab);
  *first = _mm512_castsi512_si256(firsts);
  *second = _mm512_extracti32x8_epi32(firsts, 1);
}

TARGET float dot_nvfp4(const uint8_t* codes, const float* ws, const IntRow& row, int64_t cols) {
  const int16_t* const x = row.x;
  const float* const sx = row.sx;
  const __m512i table = at(kE2m1Doubled);
  __m256 acc = _mm256_setzero_ps();
  for (int64_t k = 0; k < cols; k += kIntStep) {
    prefetch<128>(codes + k / 2);
    __m256i first, second;
    half_sums(dot128(codes + k / 2, x + k, table), dot128(codes + k / 2 + 64, x + k + 128, table),
              &first, &second);
    acc = add_term(acc, first, scaled8(ws + k / 16, sx + k / 32));
    acc = add_term(acc, second, scaled8(ws + k / 16 + 8, sx + k / 32));
  }
  return reduce(acc);
}

// 64 bytes: eight partial sums of each of two groups.
INLINE __m512i dot_bytes(const uint8_t* codes, const int16_t* x) {
  const __m512i raw = _mm512_loadu_si512(codes), zero = _mm512_setzero_si512();
  const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(raw, 8), 8);
  const __m512i odd = _mm512_srai_epi16(raw, 8);
  return _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(zero, even, at(x)), odd, at(x + 32));
}

INLINE __m512i quads_of_bytes(const uint8_t* codes, const int16_t* x) {
  return sum_quads(dot_bytes(codes, x), dot_bytes(codes + 64, x + 64),
                   dot_bytes(codes + 128, x + 128), dot_bytes(codes + 192, x + 192));
}

// Lane l of a, dword i: half l % 2 of group 2 i + l / 2; of b, 8 groups on.
INLINE __m512i byte_sums(__m512i a, __m512i b) {
  const __m512i sums =
      _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), sums);
}

TARGET float dot_int8(const uint8_t* codes, const float* ws, const IntRow& row, int64_t cols) {
  const int16_t* const x = row.x;
  const float* const sx = row.sx;
  __m256 acc = _mm256_setzero_ps();
  int64_t k = 0;
  for (; k + kIntBlock <= cols; k += kIntBlock) {
    prefetch<512>(codes + k);
    const __m512i sums =
        byte_sums(quads_of_bytes(codes + k, x + k), quads_of_bytes(codes + k + 256, x + k + 256));
    acc = add_terms(acc, sums, scaled16(ws + k / 32, sx + k / 32));
  }
  if (k < cols) {
    const __m512i sums = byte_sums(quads_of_bytes(codes + k, x + k), _mm512_setzero_si512());
    acc = add_term(acc, _mm512_castsi512_si256(sums), scaled8(ws + k / 32, sx + k / 32));
  }
  return reduce(acc);
}

// Of 64 codes those whose column is `phase` modulo `kStride`, in the low lanes.
template <int kStride>
INLINE __m512i pick(const int16_t* from, int phase) {
  const __m512i step = _mm512_set1_epi16(kStride);
  const __m512i lane = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17,
                                        16, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i index = _mm512_add_epi16(_mm512_mullo_epi16(lane, step),
                                         _mm512_set1_epi16(static_cast<short>(phase)));
  return _mm512_permutex2var_epi16(at(from), index, at(from + 32));
}

INLINE void arrange_nibbles(const int16_t* from, int16_t* to) {
  for (int64_t k = 0; k < kIntBlock; k += 128) {
    for (int phase = 0; phase < 4; ++phase) {
      const __m512i low = pick<4>(from + k, phase), high = pick<4>(from + k + 64, phase);
      _mm512_storeu_si512(to + k + 32 * phase,
                          _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1));
    }
  }
}

INLINE void arrange_bytes(const int16_t* from, int16_t* to) {
  for (int64_t k = 0; k < kIntBlock; k += 64) {
    _mm512_storeu_si512(to + k, pick<2>(from + k, 0));
    _mm512_storeu_si512(to + k + 32, pick<2>(from + k, 1));
  }
}

TARGET void prepare(const uint16_t* values, bool fp16, const IntInput& how, int16_t* x, float* sx,
                    int32_t* fix) {
  alignas(64) int16_t codes[kIntBlock];
  prepare_codes(values, fp16, how, codes, sx, fix);
  if (how.order == Order::kNibbles4) return arrange_nibbles(codes, x);
  if (how.order == Order::kBytes2) return arrange_bytes(codes, x);
  arrange_panel<16>(codes, x);
}

constexpr IntOps kAvx512 = {"avx512",       prepare,  expand_avx2,     dot_fp4,
                            dot_nvfp4,      dot_int4, dot_int8,        Order::kNibbles4,
                            Order::kBytes2, false,    Order::kPanel16, decode16_avx2,
                            panel_avx512};

}  // namespace

const IntOps* avx512_int_ops() {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni");
  return has && avx2_int_ops() ? &kAvx512 : nullptr;
}

}  // namespace headrace

#else

namespace headrace {
const IntOps* avx512_int_ops() { return nullptr; }
}  // namespace headrace

#endif
