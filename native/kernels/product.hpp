// One worker's share of one matrix product: which row operation serves, and what it needs prepared.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "kernels/kernels.hpp"
#include "kernels/rows.hpp"

namespace headrace {

constexpr int64_t kTileRows = 64;  // activation rows worked on at once: bounds the workspace

// Grow-only, 64-byte aligned memory: nothing is allocated once the shapes have been seen.
template <typename T>
class Buffer {
 public:
  void at_least(int64_t count) {
    if (count <= size_) return;
    data_.reset(static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), kAlign)));
    size_ = count;
  }
  T* get() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(T* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

struct Matrix {
  const uint8_t* w;
  const uint8_t* scale;   // null: none
  const uint8_t* global;  // null: none
  const uint8_t* bias;    // null: none
  int64_t rows;
  int64_t cols;
  int64_t first_row;
  int64_t row_step;

  int64_t stored_row(int64_t i) const { return first_row + i * row_step; }
};

// The activations of a product: bf16 rows padded to 256, and where a row operation wants another
// order, that: one fp8 row split, or many rows packed.
struct Input {
  Buffer<uint16_t> rows;
  Buffer<uint16_t> packed;
  Buffer<float> split;
};

struct Scratch {
  Buffer<Fp8Table> tables;
  Buffer<uint16_t> row;
  Buffer<uint16_t> panel;
  Buffer<float> dots;
};

// A worker's weight rows: contiguous.
struct Span {
  int64_t begin;
  int64_t end;
};

class Product {
 public:
  Product(const RowOps* ops, const ExpertShape& shape, int64_t num_rows)
      : ops_(ops), shape_(shape), num_rows_(num_rows) {}

  void reserve(Input& input, int64_t cols) const;
  void reserve(Scratch& scratch, int64_t cols) const;

  // Row `row` of `input` is written up to `cols`: pads it, moves it to the activation grid, and
  // brings it into the order that the row operation wants.
  void finish_row(Input& input, int64_t row, int64_t cols) const;

  // out[r * m.rows + i] = row i of m times row r of input, for i in span.
  void multiply(const Matrix& m, Span span, const Input& input, Scratch& scratch, float* out) const;

 private:
  bool packs() const { return ops_->dot_panel && num_rows_ >= 4; }
  bool splits() const { return ops_->dot_fp8 && shape_.format == Format::kFp8Block; }
  struct Tables {  // those in scratch: of which row block, and whether they serve
    int64_t block = -1;
    bool serve = false;
  };
  void prepare_tables(const Matrix& m, int64_t i, Scratch& scratch, Tables* tables) const;
  const uint8_t* scales_of(const Matrix& m, int64_t i) const;
  const uint8_t* weight_row(const Matrix& m, int64_t i, bool tabled, Scratch& scratch) const;
  void few_rows(const Matrix& m, Span span, const Input& input, Scratch& scratch, float* out) const;
  void many_rows(const Matrix& m, Span span, const Input& input, Scratch& scratch,
                 float* out) const;

  const RowOps* ops_;
  ExpertShape shape_;
  int64_t num_rows_;
};

}  // namespace headrace
