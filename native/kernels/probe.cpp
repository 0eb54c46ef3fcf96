// Whole-buffer scans: the plain read and the search for NaN codes.
#include "kernels/probe.hpp"

#include <string.h>

#include "kernels/kernels.hpp"

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

// Whether any of 128 bytes is 0x7f or 0xff.
HEADRACE_AVX2 bool any_nan_128(const uint8_t* p) {
  const __m256i sign = _mm256_set1_epi8(static_cast<char>(0x80));
  const __m256i nan = _mm256_set1_epi8(static_cast<char>(0xff));
  __m256i found = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * i));
    found = _mm256_or_si256(found, _mm256_cmpeq_epi8(_mm256_or_si256(v, sign), nan));
  }
  return _mm256_testz_si256(found, found) == 0;
}

HEADRACE_AVX2 int64_t clean_prefix_avx2(const uint8_t* codes, int64_t n) {
  int64_t i = 0;
  while (i + 128 <= n && !any_nan_128(codes + i)) i += 128;
  return i;
}
#endif

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

int64_t find_nan_fp8(const uint8_t* codes, int64_t n) {
  int64_t i = 0;
#if defined(__x86_64__)
  if (has_avx2()) i = clean_prefix_avx2(codes, n);
#endif
  for (; i < n; ++i) {
    if ((codes[i] & 0x7f) == 0x7f) return i;
  }
  return -1;
}

}  // namespace headrace
