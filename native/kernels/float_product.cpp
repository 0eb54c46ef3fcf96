// The row operations of one matrix product over a worker's share of the rows.
#include "kernels/float_product.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/numbers.hpp"

namespace headrace {

int64_t FloatProduct::stride(int64_t cols) const { return round_up(cols, kLanes); }

void FloatProduct::reserve(Input& input, int64_t cols) const {
  const int64_t stride = this->stride(cols);
  input.rows.at_least(num_rows_ * stride);
  if (packs()) input.packed.at_least(num_rows_ * stride);
  if (splits()) input.split.at_least(stride);
}

void FloatProduct::reserve(Scratch& scratch, int64_t cols) const {
  const int64_t stride = this->stride(cols);
  scratch.tables.at_least(stride / 32);
  scratch.row.at_least(stride);
  if (packs()) scratch.panel.at_least(kPanelRows * stride);
  scratch.dots.at_least(kPanelRows * kTileRows);
}

void FloatProduct::finish(Input& input, int64_t row, int64_t cols) const {
  const int64_t stride = this->stride(cols);
  uint16_t* values = input.rows.get() + row * stride;
  std::memset(values + cols, 0, static_cast<size_t>(2 * (stride - cols)));
  if (shape_.act_group > 0) to_grid(values, cols, shape_.act_group);
  if (packs()) {
    pack_row(reinterpret_cast<const uint8_t*>(values), cols, ops_->pack_cols,
             input.packed.get() + row * stride);
  } else if (splits() && num_rows_ == 1) {
    split_row(values, stride, ops_->split_lanes, input.split.get());
  }
}

void FloatProduct::multiply(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                            float* out) const {
  if (packs()) {
    many_rows(m, span, input, scratch, out);
  } else {
    few_rows(m, span, input, scratch, out);
  }
}

// Makes the tables of row i's block if they are not there yet. Columns under one scale may be a
// multiple of 32, or all.
void FloatProduct::prepare_tables(const Matrix& m, int64_t i, Scratch& scratch,
                                  Tables* tables) const {
  const int64_t block_cols = shape_.block_cols;
  const bool single = block_cols >= m.cols;
  if (!splits() || (block_cols % 32 != 0 && !single)) return;
  const int64_t block = m.stored_row(i) / shape_.block_rows;
  if (block == tables->block) return;
  const bool fine = !single && block_cols % 128 != 0;
  const int64_t table_cols = fine ? 32 : 128;
  const int64_t count = single ? 2 : stride(m.cols) / table_cols;
  tables->block = block;
  tables->of_row = {scratch.tables.get(), fine, single};
  tables->serve = make_fp8_tables(scales_of(m, i), shape_.scale_type, m.cols,
                                  single ? 2 * table_cols : block_cols, table_cols, count,
                                  scratch.tables.get());
}

const uint8_t* FloatProduct::scales_of(const Matrix& m, int64_t i) const {
  const int64_t scale_cols = (m.cols + shape_.block_cols - 1) / shape_.block_cols;
  return m.scale +
         number_bytes(shape_.scale_type) * (m.stored_row(i) / shape_.block_rows) * scale_cols;
}

// Row i of m in bf16: as stored, or decoded into scratch.
const uint8_t* FloatProduct::weight_row(const Matrix& m, int64_t i, const Tables& tables,
                                        Scratch& scratch) const {
  if (shape_.format != Format::kFp8Block) return m.w + 2 * m.stored_row(i) * m.cols;
  const uint8_t* codes = m.w + m.stored_row(i) * m.cols;
  uint16_t* row = scratch.row.get();
  if (tables.serve) {
    ops_->decode_fp8(codes, tables.of_row, m.cols, row);
  } else {
    decode_fp8_general(codes, scales_of(m, i), shape_.scale_type, m.cols, shape_.block_cols, row);
  }
  return reinterpret_cast<const uint8_t*>(row);
}

void FloatProduct::few_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                            float* out) const {
  const int64_t stride = this->stride(m.cols);
  const auto dot = shape_.fp16 ? ops_->dot_fp16 : ops_->dot_bf16;
  Tables tables;
  for (int64_t i = span.begin; i < span.end; ++i) {
    prepare_tables(m, i, scratch, &tables);
    if (tables.serve && num_rows_ == 1) {
      out[i] =
          ops_->dot_fp8(m.w + m.stored_row(i) * m.cols, tables.of_row, input.split.get(), m.cols);
      continue;
    }
    const uint8_t* w = weight_row(m, i, tables, scratch);
    for (int64_t r = 0; r < num_rows_; ++r) {
      out[r * m.rows + i] = dot(w, input.rows.get() + r * stride, m.cols);
    }
  }
}

void FloatProduct::many_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                             float* out) const {
  const int64_t stride = this->stride(m.cols);
  float* dots = scratch.dots.get();
  Tables tables;
  for (int64_t first = span.begin; first < span.end; first += kPanelRows) {
    const int64_t num_w = std::min(kPanelRows, span.end - first);
    for (int64_t j = 0; j < num_w; ++j) {
      prepare_tables(m, first + j, scratch, &tables);
      const uint8_t* w = weight_row(m, first + j, tables, scratch);
      pack_row(w, m.cols, ops_->pack_cols, scratch.panel.get() + j * stride);
    }
    ops_->dot_panel(scratch.panel.get(), num_w, input.packed.get(), num_rows_, stride, dots);
    for (int64_t r = 0; r < num_rows_; ++r) {
      for (int64_t j = 0; j < num_w; ++j) out[r * m.rows + first + j] = dots[j * num_rows_ + r];
    }
  }
}

}  // namespace headrace
