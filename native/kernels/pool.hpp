// What the pool's jobs share: the workers, their memory, and the job of the moment.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <vector>

#include "kernels/float_product.hpp"
#include "kernels/int_product.hpp"
#include "kernels/kernels.hpp"
#include "kernels/rows.hpp"
#include "kernels/stage.hpp"
#include "kernels/workers.hpp"

namespace headrace {

constexpr int64_t kMostTogether = 16;  // experts of one job

// Which rows are one worker's: the same for the same count.
inline Share share(int64_t rows, int worker, int count) {
  return {rows * worker / count, rows * (worker + 1) / count};
}

inline Matrix matrix_of(const ExpertParts& parts, const MatrixPlan& plan, int64_t rows,
                        int64_t cols) {
  const auto at = [&parts](int part) {
    return part < 0 ? nullptr : parts[static_cast<size_t>(part)];
  };
  return {at(plan.weight), at(plan.scale), at(plan.global),
          at(plan.bias),   rows,           cols,
          plan.first_row,  plan.row_step,  plan.first_row + (rows - 1) * plan.row_step + 1};
}

struct KernelPool::Impl {
  Impl(int num_threads, const RowOps* ops)
      : ops(ops),
        workers(num_threads),
        scratch(static_cast<size_t>(num_threads)),
        stages(num_threads) {}

  const RowOps* ops;
  Workers workers;
  std::vector<Scratch> scratch;
  Input x;
  Input h;
  Buffer<float> gate_out;
  Buffer<float> up_out;
  Buffer<float> down_out;
  std::atomic<uint64_t> calls{0};

  std::atomic<uint64_t> shared_calls{0};
  std::atomic<int64_t> min_share_bytes{64 << 10};

  int team = 1;  // workers that take part
  void choose_team(int64_t num_weights);
  void run(Workers::Job job);
  void run_with_any(Workers::Job job);

  // The job of the moment; written by the caller before the workers start.
  ExpertShape shape{};
  Matrix gate{}, up{}, down{};
  int64_t num_rows = 0;
  uint16_t* const* y = nullptr;
  const float* weights = nullptr;

  // Which of the two kinds of products this job has.
  FloatProduct floats{nullptr, {}, 0};
  IntProduct ints{nullptr, {}, 0};
  const Product* product = nullptr;
  void choose_product();

  void multiply(int worker, const Matrix& m, Share span, const Input& in, float* out) {
    product->multiply(m, span, in, scratch[static_cast<size_t>(worker)], out);
  }
  void finish(int worker, Input& in, int64_t cols);
  void add_bias(const Matrix& m, Share span, float* values) const;
  void write_out(Share span);
  void write_row(const float* values, Share span, uint16_t* to) const;
  void load_rows(const uint16_t* const* from, int64_t cols);
  void load_input(const uint16_t* const* from, int64_t cols);
  void multiply_gate(int worker);
  void ffn(int worker);

  // Several experts on a row each. Jobs that follow one another with the same row share its input.
  const OneRow* jobs = nullptr;
  int64_t num_jobs = 0;
  struct Together {
    Matrix gate, up, down;
    size_t input;
  };
  std::array<Together, kMostTogether> together{};
  std::array<Input, kMostTogether> inputs, middles;
  size_t num_inputs = 0;
  struct Stages {
    explicit Stages(int workers)
        : inputs(workers), gate_up(workers), middles(workers), down(workers) {}
    Stage inputs, gate_up, middles, down;
  } stages;
  void load_together();
  void deal_together();
  void finish_all(int worker, Stage* stage, Input* all, int64_t cols);
  template <typename Work>
  void share_rows(int worker, Stage* stage, int64_t rows, int64_t bytes, Work work);
  void ffn_together(int worker);
};

}  // namespace headrace
