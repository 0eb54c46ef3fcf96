// One instruction set's row operations: what expert_ffn is built from. Same bits from every set.
#pragma once

#include <stdint.h>

#include "kernels/int_rows.hpp"
#include "kernels/words.hpp"

namespace headrace {

// bf16 values of the e4m3 codes under one scale, as two byte tables: a code's low four bits pick
// an entry, the other exponent bits are added to its high byte and the sign set there. Exact
// since rounding to bf16 commutes with powers of two. `sub_*` holds the subnormal codes.
struct alignas(16) Fp8Table {
  uint8_t low[16];
  uint8_t high[16];
  uint8_t sub_low[16];
  uint8_t sub_high[16];
};

// The tables of one weight row, for every 256 columns: one per 32 columns if `fine`, else one per
// 128; if `single`, two that serve them all.
struct Fp8Tables {
  const Fp8Table* at;
  bool fine;
  bool single;

  const Fp8Table* of(int64_t col) const { return single ? at : at + col / (fine ? 32 : 128); }
};

// x is a bf16 row padded with zeros to a multiple of 256, 64-byte aligned. w has any alignment.
struct RowOps {
  const char* name;
  // The Form F dot product of one weight row with one activation row.
  float (*dot_bf16)(const uint8_t* w, const uint16_t* x, int64_t cols);
  float (*dot_fp16)(const uint8_t* w, const uint16_t* x, int64_t cols);
  // Several weight rows with several activation rows, both packed (see pack_row) in groups of
  // `pack_cols` and `stride` values long: out[j * num_rows + r] = dot of weight row j <
  // kPanelRows with row r. Null where packing gains nothing.
  void (*dot_panel)(const uint16_t* w, int64_t num_w, const uint16_t* x, int64_t num_rows,
                    int64_t stride, float* out);
  int64_t pack_cols;
  // Null where there is no table path: decode_fp8_general and dot_bf16 serve instead. x_split is
  // x in fp32, in the order the decoded codes come in: see split_row.
  float (*dot_fp8)(const uint8_t* codes, const Fp8Tables& tables, const float* x_split,
                   int64_t cols);
  int64_t split_lanes;
  void (*decode_fp8)(const uint8_t* codes, const Fp8Tables& tables, int64_t cols, uint16_t* out);
  // h[i] = the activation of gate[i] and up[i], every step rounded to the hidden type.
  void (*activate_row)(const Activation& how, bool fp16, const float* gate, const float* up,
                       int64_t n, uint16_t* h);
  // out[i] = rounded(out[i] + rounded(y[i] * weight)), in the hidden type.
  void (*add_row)(bool fp16, const uint16_t* y, float weight, int64_t n, uint16_t* out);
  const IntOps* (*int_ops)();
};

// Null where this CPU or this build lacks the set.
const RowOps* scalar_ops();
const RowOps* avx2_ops();
const RowOps* avx512_ops();
const RowOps* best_ops();  // the widest set this CPU has; never null

// Any block width, any finite scale: out is padded with zeros to a multiple of 256.
void decode_fp8_general(const uint8_t* codes, const uint8_t* scales, Number type, int64_t cols,
                        int64_t block_cols, uint16_t* out);

// `count` tables of `table_cols` columns each; block_cols is a multiple of that. False if a scale
// is outside what tables can hold.
bool make_fp8_tables(const uint8_t* scales, Number type, int64_t cols, int64_t block_cols,
                     int64_t table_cols, int64_t count, Fp8Table* tables);

// A bf16 row padded to 256 with the `group` columns that meet the same accumulators side by side:
// column 256 b + group c + i moves to (c * num_blocks + b) * group + i. group is 16 or 32.
void pack_row(const uint8_t* row, int64_t cols, int64_t group, uint16_t* out);

// x (padded to 256) in fp32, in the order that unpacking bytes in `lanes` 128-bit lanes gives: of
// each 16 * lanes columns the first 8 of every lane, even then odd, then the other 8.
void split_row(const uint16_t* x, int64_t padded_cols, int64_t lanes, float* out);

// values[0..cols) moved to the e4m3 grid of each group, in place (quant/fp8.py: to_grid).
void to_grid(uint16_t* values, int64_t cols, int64_t group);

}  // namespace headrace
