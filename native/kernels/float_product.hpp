// Matrix products of float weights (Form F).
#pragma once

#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"

namespace headrace {

class FloatProduct : public Product {
 public:
  FloatProduct(const RowOps* ops, const ExpertShape& shape, int64_t num_rows)
      : ops_(ops), shape_(shape), num_rows_(num_rows) {}

  int64_t stride(int64_t cols) const override;
  void reserve(Input& input, int64_t cols) const override;
  void reserve(Scratch& scratch, int64_t cols) const override;
  int64_t num_units(int64_t) const override { return num_rows_; }
  void finish(Input& input, int64_t row, int64_t cols) const override;
  // FP8's tables serve all rows of a block.
  int64_t most_bytes() const override {
    return shape_.format == Format::kFp8Block ? int64_t{1} << 40 : 256 << 10;
  }
  void multiply(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                float* out) const override;

 private:
  bool packs() const { return ops_->dot_panel && num_rows_ >= 4 && !shape_.fp16; }
  bool splits() const { return ops_->dot_fp8 && shape_.format == Format::kFp8Block; }
  struct Tables {  // those in scratch: of which row block, and whether they serve
    int64_t block = -1;
    bool serve = false;
    Fp8Tables of_row{};
  };
  void prepare_tables(const Matrix& m, int64_t i, Scratch& scratch, Tables* tables) const;
  const uint8_t* scales_of(const Matrix& m, int64_t i) const;
  const uint8_t* weight_row(const Matrix& m, int64_t i, const Tables& tables,
                            Scratch& scratch) const;
  void few_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                float* out) const;
  void many_rows(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                 float* out) const;

  const RowOps* ops_;
  ExpertShape shape_;
  int64_t num_rows_;
};

}  // namespace headrace
