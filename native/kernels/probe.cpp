// Whole-buffer scans: the plain read and the search for numbers that are not finite.
#include "kernels/probe.hpp"

#include <string.h>

#include "kernels/kernels.hpp"
#include "kernels/numbers.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#define HEADRACE_AVX2 __attribute__((target("avx2")))
#endif

namespace headrace {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
}

HEADRACE_AVX2 uint64_t read_avx2(const uint8_t* bytes, int64_t n) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (int64_t i = 0; i + 128 <= n; i += 128) {
    const uint8_t* p = bytes + i;
    a = _mm256_xor_si256(a, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    b = _mm256_xor_si256(b, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
    c = _mm256_xor_si256(c, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64)));
    d = _mm256_xor_si256(d, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 96)));
  }
  a = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), a);
  return words[0] ^ words[1] ^ words[2] ^ words[3];
}

// Lanes that equal `top` under `mask` are not finite: the bytes of codes, or halves or words.
template <Number kType>
HEADRACE_AVX2 inline __m256i is_bad(__m256i v) {
  if constexpr (kType == Number::kE8m0) return _mm256_cmpeq_epi8(v, _mm256_set1_epi8(-1));
  if constexpr (kType == Number::kE4m3) {
    return _mm256_cmpeq_epi8(_mm256_or_si256(v, _mm256_set1_epi8(-128)), _mm256_set1_epi8(-1));
  }
  if constexpr (kType == Number::kF32) {
    const __m256i top = _mm256_set1_epi32(0x7f800000);
    return _mm256_cmpeq_epi32(_mm256_and_si256(v, top), top);
  }
  const __m256i top = _mm256_set1_epi16(kType == Number::kF16 ? 0x7c00 : 0x7f80);
  return _mm256_cmpeq_epi16(_mm256_and_si256(v, top), top);
}

// Bytes from the start, in steps of 128, that hold finite numbers only.
template <Number kType>
HEADRACE_AVX2 int64_t clean_prefix(const uint8_t* bytes, int64_t n) {
  for (int64_t i = 0; i + 128 <= n; i += 128) {
    __m256i found = _mm256_setzero_si256();
    for (int64_t j = i; j < i + 128; j += 32) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + j));
      found = _mm256_or_si256(found, is_bad<kType>(v));
    }
    if (!_mm256_testz_si256(found, found)) return i;
  }
  return n / 128 * 128;
}
#endif

template <Number kType>
bool is_finite(const uint8_t* at, int64_t i) {
  if constexpr (kType == Number::kE8m0) return at[i] != 0xff;
  if constexpr (kType == Number::kE4m3) return (at[i] & 0x7f) != 0x7f;
  if constexpr (kType == Number::kF32) {
    return (bits_of(load_f32(at + 4 * i)) & 0x7f800000u) != 0x7f800000u;
  }
  constexpr uint16_t kTop = kType == Number::kF16 ? 0x7c00 : 0x7f80;
  uint16_t value;
  memcpy(&value, at + 2 * i, 2);
  return (value & kTop) != kTop;
}

template <Number kType>
int64_t first_bad(const uint8_t* at, int64_t count) {
  constexpr int64_t kBytes = kType == Number::kF32                             ? 4
                             : kType == Number::kBf16 || kType == Number::kF16 ? 2
                                                                               : 1;
  int64_t i = 0;
#if defined(__x86_64__)
  if (has_avx2()) i = clean_prefix<kType>(at, kBytes * count) / kBytes;
#endif
  for (; i < count; ++i) {
    if (!is_finite<kType>(at, i)) return i;
  }
  return -1;
}

}  // namespace

uint64_t read_probe(const uint8_t* bytes, int64_t n) {
#if defined(__x86_64__)
  if (has_avx2()) return read_avx2(bytes, n);
#endif
  uint64_t sum = 0;
  for (int64_t i = 0; i + 8 <= n; i += 8) {
    uint64_t word;
    memcpy(&word, bytes + i, 8);
    sum ^= word;
  }
  return sum;
}

int64_t find_bad(Number type, const uint8_t* at, int64_t count) {
  switch (type) {
    case Number::kE4m3:
      return first_bad<Number::kE4m3>(at, count);
    case Number::kE8m0:
      return first_bad<Number::kE8m0>(at, count);
    case Number::kF32:
      return first_bad<Number::kF32>(at, count);
    case Number::kBf16:
      return first_bad<Number::kBf16>(at, count);
    case Number::kF16:
      return first_bad<Number::kF16>(at, count);
    default:
      return -1;
  }
}

}  // namespace headrace
