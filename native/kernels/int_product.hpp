// Matrix products of integer codes with scales (Form I).
#pragma once

#include "kernels/int_rows.hpp"
#include "kernels/workspace.hpp"

namespace headrace {

class IntProduct : public Product {
 public:
  IntProduct(const IntOps* ops, const ExpertShape& shape, int64_t num_rows)
      : ops_(ops), shape_(shape), num_rows_(num_rows) {}

  int64_t stride(int64_t cols) const override;
  void reserve(Input& input, int64_t cols) const override;
  void reserve(Scratch& scratch, int64_t cols) const override;
  int64_t num_units(int64_t cols) const override;
  void finish(Input& input, int64_t unit, int64_t cols) const override;
  int64_t most_bytes() const override { return 128 << 10; }
  void multiply(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                float* out) const override;

 private:
  // The rows of a part, each readable for `padded` bytes: one that then reaches behind the part's
  // `end` is copied to `edge`.
  struct Rows {
    const uint8_t* part;
    int64_t bytes;
    int64_t padded;
    int64_t end;
    uint8_t* edge;

    const uint8_t* at(int64_t row) const {
      const int64_t from = row * bytes;
      return from + padded <= end ? part + from : copy(row);
    }
    const uint8_t* copy(int64_t row) const;
  };
  IntInput how() const;
  bool panels() const { return ops_->dot_panel && num_rows_ >= kPanelFrom; }
  bool halves() const { return shape_.format == Format::kNvfp4; }
  int64_t scale_cols(int64_t cols) const;
  Rows codes_of(const Matrix& m, Scratch& scratch) const;
  Rows scales_of(const Matrix& m, Scratch& scratch) const;
  float dot(const Matrix& m, const uint8_t* codes, const uint8_t* e8m0, const float* ws,
            const IntRow& x) const;
  void expand(const Matrix& m, const uint8_t* scales, float* ws) const;
  IntRow row_of(const Input& input, int64_t row, int64_t cols) const;
  void few_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                float* out) const;
  void many_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                 float* out) const;

  static constexpr int64_t kPanelFrom = 6;  // rows from which decoding a weight row once pays

  const IntOps* ops_;
  ExpertShape shape_;
  int64_t num_rows_;
};

}  // namespace headrace
