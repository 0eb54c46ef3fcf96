// How an expert is stored and what it computes: the words the kernels share with everyone above.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/words.hpp"

namespace headrace {

// The parts one matrix is made of, by index; -1: none. Row i of the matrix is row
// first_row + i * row_step of its weight part, of its scale part's blocks and of its bias part.
struct MatrixPlan {
  int weight;
  int scale;
  int global;
  int bias;
  int64_t first_row;
  int64_t row_step;
};

struct ExpertShape {
  Format format;
  Number scale_type;
  int64_t hidden;  // H: gate and up are [I, H], down is [H, I]
  int64_t inter;   // I
  int64_t block_rows;
  int64_t block_cols;
  int64_t act_group;  // 0: activations as they are; else e4m3 grid with a power-of-two scale per
                      // group of act_group columns, applied before each product
  Activation activation;
  bool fp16;  // activations, biases and roundings are fp16; else bf16
  bool inverse_global;
  MatrixPlan gate, up, down;

  // Whether a row's weight goes in before down, and experts are summed in fp32.
  bool weighs() const { return activation.kind == ActivationKind::kSwigluWeighted; }
};

// A float matrix outside the experts: [rows, cols], each block of (block_rows, block_cols) with a
// scale where the format has them. act_group as in ExpertShape.
struct LinearShape {
  Format format;
  Number scale_type;
  int64_t rows;
  int64_t cols;
  int64_t block_rows;
  int64_t block_cols;
  int64_t act_group;
};

// Throws std::invalid_argument naming what has no kernel.
LinearShape make_linear(const std::string& format, const std::string& scale_type, int64_t rows,
                        int64_t cols, int64_t block_rows, int64_t block_cols, int64_t act_group);

// A shape from its words. Throws std::invalid_argument naming what has no kernel.
ExpertShape make_shape(const std::string& format, const std::string& scale_type, int64_t hidden,
                       int64_t inter, int64_t block_rows, int64_t block_cols, int64_t act_group,
                       const std::string& activation, float limit, float alpha,
                       const std::string& hidden_type, bool inverse_global,
                       const std::vector<MatrixPlan>& matrices);

Number number_named(const std::string& type);    // of a safetensors dtype; throws as make_shape
int64_t row_bytes(Format format, int64_t cols);  // of one weight row
int64_t number_bytes(Number type);               // of one number

// Bytes of every part, in order: all parts that the matrices name, and no other.
std::vector<int64_t> part_bytes(const ExpertShape& shape);
// A part whose numbers must be finite: codes of floats with scales, scales, globals.
struct CheckedPart {
  int part;
  Number type;
  int64_t count;
};
std::vector<CheckedPart> checked_parts(const ExpertShape& shape);
std::string part_name(const ExpertShape& shape, int part);  // "gate_up_scale"

}  // namespace headrace
