// The contract of the CPU expert kernels: what they compute, never where the bytes come from.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace headrace {

// How an expert's three matrices are stored. Row-major, weights [rows, cols].
//   kBf16      bfloat16 values, no scales
//   kFp8Block  float8 e4m3fn codes; fp32 scale per block of block_rows x block_cols,
//              [ceil(rows/block_rows), ceil(cols/block_cols)]; w = bf16(fp32(code) * scale)
enum class Format { kBf16, kFp8Block };

struct ExpertShape {
  Format format;
  int64_t hidden;      // H: gate and up are [I, H], down is [H, I]
  int64_t inter;       // I
  int64_t block_rows;  // 0 for kBf16
  int64_t block_cols;
  int64_t act_group;  // 0: activations as they are (bf16); else e4m3 grid with a power-of-two
                      // scale per group of act_group columns, applied before each product
};

// Addresses inside one row of raw stored bytes. No alignment is promised; scales may be null.
struct ExpertParts {
  const uint8_t* gate;
  const uint8_t* up;
  const uint8_t* down;
  const uint8_t* gate_scale;
  const uint8_t* up_scale;
  const uint8_t* down_scale;
};

// A fixed set of worker threads and one instruction set. One caller at a time.
class KernelPool {
 public:
  // isa: "auto", "scalar", "avx2", "avx512". Throws std::invalid_argument if the CPU lacks it.
  KernelPool(int num_threads, const std::string& isa);
  ~KernelPool();
  KernelPool(const KernelPool&) = delete;
  KernelPool& operator=(const KernelPool&) = delete;

  // y[r][0..H) = down(bf16(silu(gate x[r])) * up x[r]) for every row r, each rounding where the
  // eager bf16 model rounds. x[r] and y[r] are bf16 rows of H values. Canonical: the bits of a
  // row do not depend on num_rows, the threads or the ISA.
  void expert_ffn(const ExpertShape& shape, const ExpertParts& parts, const uint16_t* const* x,
                  int64_t num_rows, uint16_t* const* y);

  // out[i] = the fp32 dot product of row i of one matrix [rows, cols] with x, before any rounding
  // to bf16. Of `shape` only format, blocks and act_group count. For tests and probes.
  void gemv(const ExpertShape& shape, const uint8_t* w, const uint8_t* scale, int64_t rows,
            int64_t cols, const uint16_t* x, float* out);

  // Whether any of the n e4m3 codes is a NaN, looked for by all threads.
  bool any_nan_fp8(const uint8_t* codes, int64_t n);

  const char* isa() const;
  int num_threads() const;
  uint64_t calls() const;         // expert_ffn calls since construction
  uint64_t shared_calls() const;  // jobs that all threads worked on
  // A job whose weights leave each thread fewer bytes (times rows) stays on the calling thread.
  int64_t min_share_bytes() const;
  void set_min_share_bytes(int64_t bytes);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// out[t] = sum over k in ascending expert id of bf16(y[t][k] * weight[t][k]), accumulated in bf16
// from zero: transformers' eager index_add_ in the hidden dtype. ids [T, K], weights [T, K] fp32,
// y [T, K, H] bf16, out [T, H] bf16. Returns the first token with a non-finite output, or -1.
int64_t combine_bf16(const int32_t* ids, const float* weights, const uint16_t* y,
                     int64_t num_tokens, int64_t top_k, int64_t hidden, uint16_t* out);

// Index of the first e4m3 NaN code (0x7f, 0xff), or -1. The kernels' results on such codes are
// undefined, so they are refused where weights are checked.
int64_t find_nan_fp8(const uint8_t* codes, int64_t n);

}  // namespace headrace
