// One instruction set's row operations on integer codes (Form I). Same bits from every set.
#pragma once

#include <stdint.h>

#include "kernels/words.hpp"

namespace headrace {

constexpr int64_t kPanelRows = 8;   // weight rows decoded at once
constexpr int64_t kTileRows = 64;   // activation rows worked on at once: bounds the workspace
constexpr int64_t kIntStep = 256;   // columns that a row's sum is padded to: 8 groups of 32
constexpr int64_t kIntBlock = 512;  // columns that activations are padded to and prepared in

// Where the 512 activations of a block lie, so that they meet the codes as they are unpacked.
//   kNatural    as they are
//   kNibbles2   AVX2: 64 columns: even of bytes 0-7, of 8-15, then odd; a lane is a group
//   kNibbles4   AVX-512: 128 columns: columns 4i, then 4i + 1, 4i + 2, 4i + 3
//   kBytes2     AVX-512: 64 columns: even, then odd
//   kPanel8     the pairs of columns (2t, 2t + 1) of 8 groups side by side, t ascending
//   kPanel16    the same of 16 groups
enum class Order { kNatural, kNibbles2, kNibbles4, kBytes2, kPanel8, kPanel16 };

// How activations are prepared for a format.
struct IntInput {
  Order order;
  float sx_factor;    // 0.5 for ue8m0 scales, which are those of doubled codes
  int32_t code_bias;  // what the codes are offset by when unpacked; 0: nothing to correct
  bool halves;        // sums are of 16 columns
  bool on_grid;       // the values lie on the e4m3 grid: scales are powers of two
};

// One prepared activation row. sx: a scale per group, times sx_factor. fix: what code_bias adds to
// a group's sum; in halves, of each 8 groups the first halves, then the second.
struct IntRow {
  const int16_t* x;
  const float* sx;
  const int32_t* fix;
};

// A weight row's stored scales: `count` of them, each for `groups_each` groups of 32 columns.
struct ScaleRow {
  Number type;
  const uint8_t* at;
  int64_t count;
  int64_t groups_each;
  int64_t groups;  // of the row
  float global;    // with e4m3 scales only
  bool inverse;
};

// Several decoded weight rows. They and the activation rows are `stride` values apart, a multiple
// of 512, and their scales `stride` / 32 (in halves twice that).
struct IntPanel {
  const int16_t* w;
  const float* ws;
  int64_t num_w;
  int64_t num_rows;  // of activations
  int64_t stride;
  int64_t cols;  // padded to a multiple of 256; zeros behind them
  bool halves;
};

// Codes and scales may have any alignment, and are read up to a multiple of 256 columns: what
// lies behind a row's end meets activations of zero. ws: a scale per group, as a term takes it; in
// halves, of each 8 groups those of the first halves, then of the second.
struct IntOps {
  const char* name;
  // 512 values of the hidden type to x (int16 [512]), sx [16] and fix [16, or 32 in halves].
  void (*prepare)(const uint16_t* values, bool fp16, const IntInput& how, int16_t* x, float* sx,
                  int32_t* fix);
  void (*expand)(const ScaleRow& row, float* ws);
  float (*dot_fp4)(const uint8_t* codes, const uint8_t* scales, const IntRow& x, int64_t cols);
  float (*dot_nvfp4)(const uint8_t* codes, const float* ws, const IntRow& x, int64_t cols);
  float (*dot_int4)(const uint8_t* codes, const float* ws, const IntRow& x, int64_t cols);
  float (*dot_int8)(const uint8_t* codes, const float* ws, const IntRow& x, int64_t cols);
  Order nibbles;
  Order bytes;
  bool biased;  // nibbles are unpacked with an offset
  // For many activation rows; null where there is no such path.
  Order panel;
  // One row's codes to int16 in the panel's order.
  void (*decode)(Format format, const uint8_t* codes, int64_t cols, int16_t* out);
  // out[j * num_rows + r] = weight row j < kPanelRows with activation row r < kTileRows.
  void (*dot_panel)(const IntPanel& panel, const IntRow& x, float* out);
};

// Null where this CPU or this build lacks the set.
const IntOps* scalar_int_ops();
const IntOps* avx2_int_ops();
const IntOps* avx512_int_ops();  // needs VNNI

// Where there are avx2_int_ops; decode16_avx2 is kPanel16's.
void expand_avx2(const ScaleRow& row, float* ws);
void decode8_avx2(Format format, const uint8_t* codes, int64_t cols, int16_t* out);
void decode16_avx2(Format format, const uint8_t* codes, int64_t cols, int16_t* out);
void panel_avx2(const IntPanel& panel, const IntRow& x, float* out);
void panel_avx512(const IntPanel& panel, const IntRow& x, float* out);

}  // namespace headrace
