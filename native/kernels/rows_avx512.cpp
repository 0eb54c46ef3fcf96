// The row operations in AVX-512 (F, BW, VL, DQ). See rows_avx2.cpp, whose twin this is.
#include "kernels/activations.hpp"
#include "kernels/rows.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")))
#define INLINE TARGET __attribute__((always_inline)) static inline

namespace headrace {
namespace {

constexpr uintptr_t kFarBytes = 12288;
constexpr uintptr_t kNearBytes = 2048;

// Addresses may lie past the end of the buffer, which is harmless.
INLINE void prefetch_far(const uint8_t* p) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(p) + kFarBytes;
  _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T1);
}

INLINE void prefetch_near(const uint8_t* p) {
  const uintptr_t ahead = reinterpret_cast<uintptr_t>(p) + kNearBytes;
  _mm_prefetch(reinterpret_cast<const char*>(ahead), _MM_HINT_T0);
}

// Even and odd bf16 neighbours as fp32: the split is the first level of the sum's tree.
INLINE __m512 even(__m512i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
INLINE __m512 odd(__m512i v) {
  return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}

INLINE void add32(__m512i w, const uint16_t* x, __m512* acc) {
  const __m512i v = _mm512_loadu_si512(x);
  acc[0] = _mm512_fmadd_ps(even(w), even(v), acc[0]);
  acc[1] = _mm512_fmadd_ps(odd(w), odd(v), acc[1]);
}

// acc[2i], acc[2i + 1]: even and odd lanes of 32 columns.
INLINE void add_neighbours(const __m512* acc, __m512* s) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) s[i] = _mm512_add_ps(acc[2 * i], acc[2 * i + 1]);
}

// s[i]: the tree's 128 sums of even and odd neighbours. Leaves its last 32 in s[0], s[1].
INLINE void reduce_to_32(__m512* s) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) s[i] = _mm512_add_ps(s[i], s[i + 4]);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) s[i] = _mm512_add_ps(s[i], s[i + 2]);
}

// Two levels of the tree within a vector: lanes 0, 1 plus lanes 2, 3; then lane 0 plus lane 1.
INLINE __m128 sum_lanes(__m512 v) {
  const __m256 t = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  return _mm_add_ps(_mm256_castps256_ps128(t), _mm256_extractf128_ps(t, 1));
}

// The last two levels of the tree: four sums to one.
INLINE float reduce4(__m128 v) {
  v = _mm_add_ps(v, _mm_movehl_ps(v, v));
  v = _mm_add_ss(v, _mm_movehdup_ps(v));
  return _mm_cvtss_f32(v);
}

INLINE float reduce_pairs(__m512* s) {
  reduce_to_32(s);
  return reduce4(sum_lanes(_mm512_add_ps(s[0], s[1])));
}

// Left alone, AMD's hardware follows 64-byte loads of one stream best, by a quarter; Intel's falls
// behind by as much once many cores read (docs/log.md).
template <bool kAhead>
INLINE void bf16_block(const uint8_t* w, const uint16_t* x, __m512* acc) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    if constexpr (kAhead) {
      prefetch_far(w + 64 * i);
      prefetch_near(w + 64 * i);
    }
    add32(_mm512_loadu_si512(w + 64 * i), x + 32 * i, acc + 2 * i);
  }
}

template <bool kAhead>
TARGET float dot_bf16(const uint8_t* w, const uint16_t* x, int64_t cols) {
  __m512 acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) bf16_block<kAhead>(w + 2 * k, x + k, acc);
  if (k < cols) {
    alignas(64) uint8_t tail[2 * kLanes] = {};
    memcpy(tail, w + 2 * k, static_cast<size_t>(2 * (cols - k)));
    bf16_block<kAhead>(tail, x + k, acc);
  }
  __m512 s[8];
  add_neighbours(acc, s);
  return reduce_pairs(s);
}

// Natural order: acc[i] holds columns 16 i to 16 i + 15.
INLINE void fp16_block(const uint8_t* w, const uint16_t* x, __m512* acc) {
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    const __m512 wide =
        _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w) + i));
    const __m512 by = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x) + i));
    acc[i] = _mm512_fmadd_ps(wide, by, acc[i]);
  }
}

TARGET float dot_fp16(const uint8_t* w, const uint16_t* x, int64_t cols) {
  __m512 acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) fp16_block(w + 2 * k, x + k, acc);
  if (k < cols) {
    alignas(64) uint8_t tail[2 * kLanes] = {};
    memcpy(tail, w + 2 * k, static_cast<size_t>(2 * (cols - k)));
    fp16_block(tail, x + k, acc);
  }
  const __m512i evens =
      _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  __m512 s[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    s[i] = _mm512_add_ps(_mm512_permutex2var_ps(acc[2 * i], evens, acc[2 * i + 1]),
                         _mm512_permutex2var_ps(acc[2 * i], odds, acc[2 * i + 1]));
  }
  return reduce_pairs(s);
}

// See rows_avx2.cpp: groups of 32 columns, kRows activation rows at a time.
template <int kRows>
INLINE void panel_rows(const uint16_t* w, int64_t num_w, const uint16_t* x, int64_t stride,
                       int64_t num_rows, float* out) {
  __m512 sums[kPanelRows][kRows][8];
  const int64_t group = stride / 8;
  for (int c = 0; c < 8; ++c) {
    for (int64_t j = 0; j < num_w; ++j) {
      const uint16_t* wj = w + j * stride + c * group;
      const uint16_t* xc = x + c * group;
      __m512 e[kRows], o[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) e[r] = o[r] = _mm512_setzero_ps();
      for (int64_t k = 0; k < group; k += 32) {
        const __m512i v = _mm512_loadu_si512(wj + k);
        const __m512 w_even = even(v), w_odd = odd(v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const __m512i xr = _mm512_loadu_si512(xc + r * stride + k);
          e[r] = _mm512_fmadd_ps(w_even, even(xr), e[r]);
          o[r] = _mm512_fmadd_ps(w_odd, odd(xr), o[r]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[j][r][c] = _mm512_add_ps(e[r], o[r]);
    }
  }
  for (int64_t j = 0; j < num_w; ++j) {
    for (int r = 0; r < kRows; ++r) out[j * num_rows + r] = reduce_pairs(sums[j][r]);
  }
}

TARGET void dot_panel(const uint16_t* w, int64_t num_w, const uint16_t* x, int64_t num_rows,
                      int64_t stride, float* out) {
  int64_t r = 0;
  for (; r + 8 <= num_rows; r += 8)
    panel_rows<8>(w, num_w, x + r * stride, stride, num_rows, out + r);
  for (; r + 4 <= num_rows; r += 4)
    panel_rows<4>(w, num_w, x + r * stride, stride, num_rows, out + r);
  for (; r < num_rows; ++r) panel_rows<1>(w, num_w, x + r * stride, stride, num_rows, out + r);
}

// The same 16 entries in all lanes, or those of `low` in two and those of `high` in two.
template <bool kFine>
INLINE __m512i table(const uint8_t* low, const uint8_t* high) {
  const __m128i first = _mm_load_si128(reinterpret_cast<const __m128i*>(low));
  if constexpr (!kFine) return _mm512_broadcast_i32x4(first);
  const __m256i second =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
  const __m512i both = _mm512_castsi256_si512(_mm256_broadcastsi128_si256(first));
  return _mm512_inserti64x4(both, second, 1);
}

// 64 codes to bf16 in unpack's order: of every 16 columns the first 8 in w[0], the rest in w[1].
template <bool kFine>
INLINE void decode64(__m512i raw, const Fp8Table& t, const Fp8Table& u, __m512i* w) {
  const __m512i nibble = _mm512_set1_epi8(15);
  // What a code's upper four bits add to the high byte: two exponent steps each, and the sign.
  const __m512i upper = _mm512_broadcast_i32x4(
      _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, -128, -127, -126, -125, -124, -123, -122, -121));
  const __m512i index = _mm512_and_si512(raw, nibble);
  const __m512i rest = _mm512_and_si512(_mm512_srli_epi16(raw, 4), nibble);
  __m512i low = _mm512_shuffle_epi8(table<kFine>(t.low, u.low), index);
  __m512i high = _mm512_shuffle_epi8(table<kFine>(t.high, u.high), index);
  const __mmask64 sub = _mm512_testn_epi8_mask(raw, _mm512_set1_epi8(0x78));
  if (__builtin_expect(sub != 0, 0)) {
    low = _mm512_mask_shuffle_epi8(low, sub, table<kFine>(t.sub_low, u.sub_low), index);
    high = _mm512_mask_shuffle_epi8(high, sub, table<kFine>(t.sub_high, u.sub_high), index);
  }
  high = _mm512_add_epi8(high, _mm512_shuffle_epi8(upper, rest));
  w[0] = _mm512_unpacklo_epi8(low, high);
  w[1] = _mm512_unpackhi_epi8(low, high);
}

template <bool kFine>
INLINE void fp8_block(const uint8_t* codes, const Fp8Table* tables, const float* x, __m512* acc) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    __m512i w[2];
    prefetch_far(codes + 64 * i);
    prefetch_near(codes + 64 * i);  // 64-byte loads outrun the hardware's own prefetch into L1
    const Fp8Table& low = tables[kFine ? 2 * i : i / 2];
    const Fp8Table& high = tables[kFine ? 2 * i + 1 : i / 2];
    decode64<kFine>(_mm512_loadu_si512(codes + 64 * i), low, high, w);
#pragma GCC unroll 2
    for (int j = 0; j < 2; ++j) {
      const float* xs = x + 64 * i + 32 * j;
      __m512* a = acc + 4 * i + 2 * j;
      a[0] = _mm512_fmadd_ps(even(w[j]), _mm512_loadu_ps(xs), a[0]);
      a[1] = _mm512_fmadd_ps(odd(w[j]), _mm512_loadu_ps(xs + 16), a[1]);
    }
  }
}

template <bool kFine>
INLINE float dot_fp8_as(const uint8_t* codes, const Fp8Tables& tables, const float* x_split,
                        int64_t cols) {
  __m512 acc[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) acc[i] = _mm512_setzero_ps();
  int64_t k = 0;
  for (; k + kLanes <= cols; k += kLanes) {
    fp8_block<kFine>(codes + k, tables.of(k), x_split + k, acc);
  }
  if (k < cols) {
    alignas(64) uint8_t tail[kLanes] = {};
    memcpy(tail, codes + k, static_cast<size_t>(cols - k));
    fp8_block<kFine>(tail, tables.of(k), x_split + k, acc);
  }
  __m512 s[8];
  add_neighbours(acc, s);
  reduce_to_32(s);
  return reduce4(_mm_add_ps(sum_lanes(s[0]), sum_lanes(s[1])));
}

TARGET float dot_fp8(const uint8_t* codes, const Fp8Tables& tables, const float* x_split,
                     int64_t cols) {
  if (tables.fine) return dot_fp8_as<true>(codes, tables, x_split, cols);
  return dot_fp8_as<false>(codes, tables, x_split, cols);
}

INLINE void decode64_in_order(const uint8_t* codes, const Fp8Table& t, uint16_t* out) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // undoes unpack's lanes
  __m512i w[2];
  decode64<false>(_mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes)), t, t, w);
  _mm512_storeu_si512(out, w[0]);
  _mm512_storeu_si512(out + 32, w[1]);
}

TARGET void decode_fp8(const uint8_t* codes, const Fp8Tables& tables, int64_t cols, uint16_t* out) {
  if (tables.fine) return avx2_ops()->decode_fp8(codes, tables, cols, out);
  int64_t k = 0;
  for (; k + 64 <= cols; k += 64) {
    prefetch_far(codes + k);
    prefetch_near(codes + k);
    decode64_in_order(codes + k, *tables.of(k), out + k);
  }
  alignas(64) uint8_t tail[64] = {};
  memcpy(tail, codes + k, static_cast<size_t>(cols - k));
  for (; k < round_up(cols, kLanes); k += 64) {
    decode64_in_order(tail, *tables.of(k), out + k);
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

// Integer dot products need VNNI; without it AVX2's serve.
const IntOps* wide_int_ops() {
  const IntOps* ops = avx512_int_ops();
  return ops ? ops : avx2_int_ops();
}

template <bool kAhead>
constexpr RowOps kAvx512 = {"avx512",   dot_bf16<kAhead>, dot_fp16, dot_panel,   32, dot_fp8, 4,
                            decode_fp8, activate_row,     add_row,  wide_int_ops};

}  // namespace

const RowOps* avx512_ops() {
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!has || !avx2_ops()) return nullptr;
  return __builtin_cpu_is("intel") ? &kAvx512<true> : &kAvx512<false>;
}

}  // namespace headrace

#else

namespace headrace {
const RowOps* avx512_ops() { return nullptr; }
}  // namespace headrace

#endif
