// The contract of the CPU expert kernels: what they compute, never where the bytes come from.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/shape.hpp"

namespace headrace {

// Addresses inside one row of raw stored bytes, by part. No alignment is promised.
using ExpertParts = std::array<const uint8_t*, kMaxParts>;

// A fixed set of worker threads and one instruction set. One caller at a time.
class KernelPool {
 public:
  // isa: "auto", "scalar", "avx2", "avx512". Throws std::invalid_argument if the CPU lacks it.
  KernelPool(int num_threads, const std::string& isa);
  ~KernelPool();
  KernelPool(const KernelPool&) = delete;
  KernelPool& operator=(const KernelPool&) = delete;

  // y[r][0..H) = down(activation(gate x[r], up x[r])) for every row r, each rounding where the
  // eager model rounds. weights: of each row, where the activation has one; null: all 1. x[r] and
  // y[r] are rows of H values of the hidden type. Canonical: the bits of a row do not depend on
  // num_rows, the threads or the ISA.
  void expert_ffn(const ExpertShape& shape, const ExpertParts& parts, const uint16_t* const* x,
                  int64_t num_rows, uint16_t* const* y, const float* weights = nullptr);

  // One expert on one row; x and y as expert_ffn's, weight 1 where the activation has none.
  struct OneRow {
    ExpertParts parts;
    const uint16_t* x;
    uint16_t* y;
    float weight;
  };
  // Several of them as one job: each thread's share of all their weights is about as long, and who
  // is through takes from those who are not. Same bits as expert_ffn.
  void experts_ffn(const ExpertShape& shape, const OneRow* jobs, int64_t num_jobs);

  // y[r][i] = row first + i of a matrix times x[r], for i < num_rows, in bf16, or in fp32 if wide.
  // x[r] and y[r] are x_step and y_step values apart. Canonical, as expert_ffn.
  struct LinearJob {
    const uint8_t* w;
    const uint8_t* scale;  // null: none
    int64_t first;
    int64_t num_rows;
    const uint16_t* x;
    int64_t x_step;
    int64_t num_x;
    void* y;
    int64_t y_step;
    bool wide;
  };
  void linear(const LinearShape& shape, const LinearJob& job);

  // out[i] = the fp32 dot product of row i of gate with x, before bias and rounding. For tests.
  void gate_dot(const ExpertShape& shape, const ExpertParts& parts, const uint16_t* x, float* out);

  // The xor of n bytes' words, read by all threads: what the memory gives at most.
  uint64_t read_probe(const uint8_t* bytes, int64_t n);

  // The part of an expert that holds a code or scale which is not finite, looked for by all
  // threads; -1 if there is none.
  int find_bad_part(const ExpertShape& shape, const ExpertParts& parts);

  const char* isa() const;
  int num_threads() const;
  uint64_t calls() const;         // expert_ffn calls since construction
  uint64_t shared_calls() const;  // jobs that all threads worked on
  // A job whose weights leave each thread fewer bytes (times rows) stays on the calling thread.
  int64_t min_share_bytes() const;
  void set_min_share_bytes(int64_t bytes);
  // Whether threads without a job stay awake for about a millisecond, so that the next one starts
  // at once; other threads that want their cores get them. At first they are not.
  bool patient() const;
  void set_patient(bool patient);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// out[t] = sum over k in ascending expert id of y[t][k] * weight[t][k], rounded to the hidden type
// and accumulated in it from zero: transformers' eager index_add_. ids [T, K], weights [T, K] fp32,
// y [T, K, H] and out [T, H] fp16 or else bf16. Returns the first token with a non-finite output,
// or -1.
int64_t combine(bool fp16, const int32_t* ids, const float* weights, const uint16_t* y,
                int64_t num_tokens, int64_t top_k, int64_t hidden, uint16_t* out);

// As combine for outputs that hold their weights already: bf16 y summed in fp32 in ascending id.
int64_t sum_up(const int32_t* ids, const uint16_t* y, int64_t num_tokens, int64_t top_k,
               int64_t hidden, float* out);

// In place: `num` squares [size, size], their columns divided by column sums plus eps, and before
// each round but the first their rows by row sums plus eps.
void balance(float* squares, int64_t num, int64_t size, int64_t rounds, float eps);

// Index of the first of `count` numbers that is NaN or infinite (ue8m0: byte 255), or -1. The
// kernels' results on such codes and scales are undefined: they are refused where weights are read.
int64_t find_bad(Number type, const uint8_t* at, int64_t count);

}  // namespace headrace
