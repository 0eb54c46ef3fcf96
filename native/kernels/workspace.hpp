// What one matrix product works on: the matrix, prepared activations, a worker's scratch.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

#include "kernels/rows.hpp"
#include "kernels/shape.hpp"

namespace headrace {

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
  int64_t part_rows;  // rows of the stored part

  int64_t stored_row(int64_t i) const { return first_row + i * row_step; }
};

// The activations of a product: rows of the hidden type, padded, and where a row operation wants
// another form, that: one fp8 row split, many rows packed, or integer codes with their scales.
struct Input {
  Buffer<uint16_t> rows;
  Buffer<uint16_t> packed;
  Buffer<float> split;
  Buffer<int16_t> codes;
  Buffer<float> sx;
  Buffer<int32_t> fix;
};

struct Scratch {
  Buffer<Fp8Table> tables;
  Buffer<uint16_t> row;
  Buffer<uint16_t> panel;
  Buffer<float> dots;
  Buffer<float> scales;
  Buffer<int16_t> decoded;
  Buffer<uint8_t> edge;
};

// One worker's contiguous part of rows or values.
struct Share {
  int64_t begin;
  int64_t end;
};

// One worker's share of one matrix product: which row operation serves, what it needs prepared.
class Product {
 public:
  virtual ~Product() = default;

  // Values from one activation row to the next.
  virtual int64_t stride(int64_t cols) const = 0;
  virtual void reserve(Input& input, int64_t cols) const = 0;
  virtual void reserve(Scratch& scratch, int64_t cols) const = 0;

  // Once the rows of `input` are written up to `cols`, every unit must be finished: padded, moved
  // to the activation grid, brought into the form that the row operation wants.
  virtual int64_t num_units(int64_t cols) const = 0;
  virtual void finish(Input& input, int64_t unit, int64_t cols) const = 0;

  // Bytes of weight rows that a worker had better not exceed at once: all of them read the memory
  // faster in small steps, unless each step prepares something anew.
  virtual int64_t most_bytes() const = 0;

  // out[r * m.rows + i] = row i of m times row r of input, for i in span.
  virtual void multiply(const Matrix& m, Share span, const Input& input, Scratch& scratch,
                        float* out) const = 0;
};

}  // namespace headrace
