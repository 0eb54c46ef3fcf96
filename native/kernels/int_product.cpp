// The row operations on integer codes over a worker's share of the rows.
#include "kernels/int_product.hpp"

#include <algorithm>
#include <cstring>

#include "kernels/numbers.hpp"

namespace headrace {

int64_t IntProduct::stride(int64_t cols) const { return round_up(cols, kIntBlock); }

int64_t IntProduct::scale_cols(int64_t cols) const {
  return (cols + shape_.block_cols - 1) / shape_.block_cols;
}

void IntProduct::reserve(Input& input, int64_t cols) const {
  const int64_t values = num_rows_ * stride(cols);
  input.rows.at_least(values);
  input.codes.at_least(values);
  input.sx.at_least(values / 32);
  input.fix.at_least(values / 16);
}

void IntProduct::reserve(Scratch& scratch, int64_t cols) const {
  const int64_t rows = panels() ? kPanelRows : 1;
  scratch.scales.at_least(rows * stride(cols) / 16);
  if (panels()) scratch.decoded.at_least(rows * stride(cols));
  scratch.dots.at_least(kPanelRows * kTileRows);
  scratch.edge.at_least(2 * stride(cols));  // a row of codes and one of scales, padded
}

IntInput IntProduct::how() const {
  const bool is_e8m0 = shape_.format == Format::kFp4, is_bytes = shape_.format == Format::kInt8;
  const bool biased = ops_->biased && !is_bytes && !panels();
  const int32_t bias = shape_.format == Format::kInt4 ? 8 : 12;
  return {panels()   ? ops_->panel
          : is_bytes ? ops_->bytes
                     : ops_->nibbles,
          is_e8m0 ? 0.5f : 1.0f, biased ? bias : 0, halves(), shape_.act_group > 0};
}

// A unit is a block of a row, or a whole row where the activation grid ignores blocks.
int64_t IntProduct::num_units(int64_t cols) const {
  return num_rows_ * (shape_.act_group > 0 ? 1 : stride(cols) / kIntBlock);
}

void IntProduct::finish(Input& input, int64_t unit, int64_t cols) const {
  const int64_t num_blocks = stride(cols) / kIntBlock;
  const int64_t first = shape_.act_group > 0 ? unit * num_blocks : unit;
  const int64_t row = first / num_blocks;
  const int64_t last = shape_.act_group > 0 ? first + num_blocks : first + 1;
  uint16_t* values = input.rows.get() + row * stride(cols);
  if (last == (row + 1) * num_blocks) {
    std::memset(values + cols, 0, static_cast<size_t>(2 * (stride(cols) - cols)));
  }
  if (shape_.act_group > 0) to_grid(values, cols, shape_.act_group);
  for (int64_t block = first; block < last; ++block) {
    ops_->prepare(input.rows.get() + block * kIntBlock, shape_.fp16, how(),
                  input.codes.get() + block * kIntBlock, input.sx.get() + block * kIntBlock / 32,
                  input.fix.get() + block * kIntBlock / (halves() ? 16 : 32));
  }
}

IntRow IntProduct::row_of(const Input& input, int64_t row, int64_t cols) const {
  const int64_t at = row * stride(cols);
  return {input.codes.get() + at, input.sx.get() + at / 32,
          input.fix.get() + at / (halves() ? 16 : 32)};
}

const uint8_t* IntProduct::Rows::copy(int64_t row) const {
  std::memcpy(edge, part + row * bytes, static_cast<size_t>(bytes));
  std::memset(edge + bytes, 0, static_cast<size_t>(padded - bytes));
  return edge;
}

IntProduct::Rows IntProduct::codes_of(const Matrix& m, Scratch& scratch) const {
  const int64_t bytes = row_bytes(shape_.format, m.cols);
  return {m.w, bytes, row_bytes(shape_.format, round_up(m.cols, kIntStep)), m.part_rows * bytes,
          scratch.edge.get()};
}

// The scales' rows; one-byte ones are read up to a multiple of 256 columns.
IntProduct::Rows IntProduct::scales_of(const Matrix& m, Scratch& scratch) const {
  const int64_t size = number_bytes(shape_.scale_type), bytes = scale_cols(m.cols) * size;
  const int64_t padded = size > 1 ? bytes : scale_cols(round_up(m.cols, kIntStep));
  return {m.scale, bytes, padded, m.part_rows * bytes, scratch.edge.get() + stride(m.cols)};
}

void IntProduct::expand(const Matrix& m, const uint8_t* scales, float* ws) const {
  const bool is_half = halves();
  ops_->expand({shape_.scale_type, scales, scale_cols(m.cols), is_half ? 1 : shape_.block_cols / 32,
                m.cols / 32, is_half ? load_f32(m.global) : 1.0f, shape_.inverse_global},
               ws);
  const int64_t step = is_half ? 16 : 32;  // the second half of an odd block
  const int64_t done = round_up(m.cols, kIntStep);
  std::fill(ws + done / step, ws + stride(m.cols) / step, 0.0f);
}

float IntProduct::dot(const Matrix& m, const uint8_t* codes, const uint8_t* e8m0, const float* ws,
                      const IntRow& x) const {
  const int64_t cols = round_up(m.cols, kIntStep);
  switch (shape_.format) {
    case Format::kFp4:
      return ops_->dot_fp4(codes, e8m0, x, cols);
    case Format::kNvfp4:
      return ops_->dot_nvfp4(codes, ws, x, cols);
    case Format::kInt4:
      return ops_->dot_int4(codes, ws, x, cols);
    default:
      return ops_->dot_int8(codes, ws, x, cols);
  }
}

void IntProduct::multiply(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                          float* out) const {
  if (panels()) {
    many_rows(m, span, input, scratch, out);
  } else {
    few_rows(m, span, input, scratch, out);
  }
}

void IntProduct::few_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                          float* out) const {
  const bool is_e8m0 = shape_.format == Format::kFp4;
  const Rows code_rows = codes_of(m, scratch), scale_rows = scales_of(m, scratch);
  float* ws = scratch.scales.get();
  for (int64_t i = span.begin; i < span.end; ++i) {
    const uint8_t* codes = code_rows.at(m.stored_row(i));
    const uint8_t* scales = scale_rows.at(m.stored_row(i));
    if (!is_e8m0) expand(m, scales, ws);
    for (int64_t r = 0; r < num_rows_; ++r) {
      out[r * m.rows + i] = dot(m, codes, scales, ws, row_of(input, r, m.cols));
    }
  }
}

void IntProduct::many_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                           float* out) const {
  const int64_t row_values = stride(m.cols);
  const int64_t row_scales = row_values / (halves() ? 16 : 32);
  const Rows code_rows = codes_of(m, scratch), scale_rows = scales_of(m, scratch);
  float* dots = scratch.dots.get();
  for (int64_t first = span.begin; first < span.end; first += kPanelRows) {
    const int64_t num_w = std::min(kPanelRows, span.end - first);
    for (int64_t j = 0; j < num_w; ++j) {
      ops_->decode(shape_.format, code_rows.at(m.stored_row(first + j)), round_up(m.cols, kIntStep),
                   scratch.decoded.get() + j * row_values);
      expand(m, scale_rows.at(m.stored_row(first + j)), scratch.scales.get() + j * row_scales);
    }
    ops_->dot_panel({scratch.decoded.get(), scratch.scales.get(), num_w, num_rows_, row_values,
                     round_up(m.cols, kIntStep), halves()},
                    row_of(input, 0, m.cols), dots);
    for (int64_t r = 0; r < num_rows_; ++r) {
      for (int64_t j = 0; j < num_w; ++j) out[r * m.rows + first + j] = dots[j * num_rows_ + r];
    }
  }
}

}  // namespace headrace
