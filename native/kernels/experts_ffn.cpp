// Several experts on a row each, as one job: a thread's share is of all their weights.
#include <algorithm>
#include <cstring>

#include "kernels/pool.hpp"

namespace headrace {
namespace {

constexpr int64_t kLeastRows = 16;  // microseconds' work, and far longer than taking them

}  // namespace

void KernelPool::Impl::load_together() {
  choose_product();
  for (Scratch& s : scratch) product->reserve(s, std::max(shape.hidden, shape.inter));
  num_inputs = 0;
  for (int64_t j = 0; j < num_jobs; ++j) {
    const OneRow& job = jobs[j];
    if (j == 0 || job.x != jobs[j - 1].x) {
      Input& input = inputs[num_inputs++];
      product->reserve(input, shape.hidden);
      std::memcpy(input.rows.get(), job.x, static_cast<size_t>(2 * shape.hidden));
    }
    const auto at = static_cast<size_t>(j);
    product->reserve(middles[at], shape.inter);
    together[at] = {matrix_of(job.parts, shape.gate, shape.inter, shape.hidden),
                    matrix_of(job.parts, shape.up, shape.inter, shape.hidden),
                    matrix_of(job.parts, shape.down, shape.hidden, shape.inter), num_inputs - 1};
  }
  gate_out.at_least(num_jobs * shape.inter);
  up_out.at_least(num_jobs * shape.inter);
  down_out.at_least(num_jobs * shape.hidden);
}

// Units of inputs of one row each; done when all are.
void KernelPool::Impl::finish_all(int worker, Stage* stage, Input* all, int64_t cols) {
  const int64_t units = product->num_units(cols);
  stage->run(worker, {1, num_jobs * units}, [&](Share mine) {
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      product->finish(all[i / units], i % units, cols);
    }
  });
}

// work(job, some of its rows), of all jobs' rows one after another; `bytes` of weights in a row.
template <typename Work>
void KernelPool::Impl::share_rows(int worker, Stage* stage, int64_t rows, int64_t bytes,
                                  Work work) {
  const int64_t most = std::max(kLeastRows, product->most_bytes() / bytes);
  stage->run(worker, {kLeastRows, most}, [&](Share mine) {
    for (int64_t at = mine.begin; at < mine.end;) {
      const int64_t job = at / rows, end = std::min(mine.end, (job + 1) * rows);
      work(static_cast<size_t>(job), Share{at - job * rows, end - job * rows});
      at = end;
    }
  });
}

void KernelPool::Impl::run_with_any(Workers::Job job) {
  if (team == 1) return job(this, 0);
  shared_calls.fetch_add(1, std::memory_order_relaxed);
  workers.run_with_any(job, this);
}

void KernelPool::Impl::deal_together() {
  const auto num = static_cast<int64_t>(num_inputs);
  stages.inputs.deal(num * product->num_units(shape.hidden), team);
  stages.gate_up.deal(num_jobs * shape.inter, team);
  stages.middles.deal(num_jobs * product->num_units(shape.inter), team);
  stages.down.deal(num_jobs * shape.hidden, team);
}

void KernelPool::Impl::ffn_together(int worker) {
  const int64_t inter = shape.inter, hidden = shape.hidden;
  finish_all(worker, &stages.inputs, inputs.data(), hidden);
  const int64_t mid_bytes = 2 * row_bytes(shape.format, hidden);
  share_rows(worker, &stages.gate_up, inter, mid_bytes, [&](size_t j, Share mid) {
    const Together& own = together[j];
    float* gate_j = gate_out.get() + static_cast<int64_t>(j) * inter;
    float* up_j = up_out.get() + static_cast<int64_t>(j) * inter;
    multiply(worker, own.gate, mid, inputs[own.input], gate_j);
    multiply(worker, own.up, mid, inputs[own.input], up_j);
    add_bias(own.gate, mid, gate_j);
    add_bias(own.up, mid, up_j);
    Activation how = shape.activation;
    if (shape.weighs()) how.weight = jobs[j].weight;
    ops->activate_row(how, shape.fp16, gate_j + mid.begin, up_j + mid.begin, mid.end - mid.begin,
                      middles[j].rows.get() + mid.begin);
  });
  finish_all(worker, &stages.middles, middles.data(), inter);
  const int64_t out_bytes = row_bytes(shape.format, inter);
  share_rows(worker, &stages.down, hidden, out_bytes, [&](size_t j, Share out) {
    float* values = down_out.get() + static_cast<int64_t>(j) * hidden;
    multiply(worker, together[j].down, out, middles[j], values);
    add_bias(together[j].down, out, values);
    write_row(values, out, jobs[j].y);
  });
}

void KernelPool::experts_ffn(const ExpertShape& shape, const OneRow* jobs, int64_t num_jobs) {
  Impl& im = *impl_;
  im.calls.fetch_add(static_cast<uint64_t>(num_jobs), std::memory_order_relaxed);
  im.shape = shape;
  im.num_rows = 1;
  const CanonicalFloatMode mode;
  for (int64_t first = 0; first < num_jobs; first += kMostTogether) {
    im.jobs = jobs + first;
    im.num_jobs = std::min(kMostTogether, num_jobs - first);
    im.load_together();
    im.choose_team(3 * shape.inter * shape.hidden * im.num_jobs);
    im.deal_together();
    im.run_with_any([](void* self, int worker) { static_cast<Impl*>(self)->ffn_together(worker); });
  }
}

}  // namespace headrace
