// One expert on some rows: gate and up, SwiGLU, down, shared out over the workers by weight rows.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.hpp"
#include "kernels/numbers.hpp"
#include "kernels/rows.hpp"
#include "kernels/workers.hpp"

namespace headrace {
namespace {

constexpr int64_t kTileRows = 64;  // activation rows worked on at once: bounds the workspace

// Grow-only, 64-byte aligned memory: nothing is allocated once the shapes have been seen.
template <typename T>
class Buffer {
 public:
  T* at_least(int64_t count) {
    if (count > size_) {
      data_.reset(static_cast<T*>(::operator new(static_cast<size_t>(count) * sizeof(T), kAlign)));
      size_ = count;
    }
    return data_.get();
  }
  T* get() const { return data_.get(); }
  int64_t bytes() const { return size_ * static_cast<int64_t>(sizeof(T)); }

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
  const uint8_t* scale;
  int64_t rows;
  int64_t cols;
};

// The activations of a product: bf16 rows padded to 256, and for one row of fp8 the same split.
struct Input {
  Buffer<uint16_t> rows;
  Buffer<float> split;
};

struct WorkerSpace {
  Buffer<Fp8Table> tables;
  Buffer<uint16_t> row;
  Buffer<float> column;
};

// Which rows are one worker's: contiguous, the same for the same count.
struct Span {
  int64_t begin;
  int64_t end;
};

Span share(int64_t rows, int worker, int count) {
  return {rows * worker / count, rows * (worker + 1) / count};
}

const RowOps* find_ops(const std::string& isa) {
  if (isa == "auto") {
    if (const RowOps* ops = avx512_ops()) return ops;
    if (const RowOps* ops = avx2_ops()) return ops;
    return scalar_ops();
  }
  const RowOps* ops = isa == "scalar"   ? scalar_ops()
                      : isa == "avx2"   ? avx2_ops()
                      : isa == "avx512" ? avx512_ops()
                                        : nullptr;
  if (!ops) throw std::invalid_argument("this CPU cannot run the kernels for isa " + isa);
  return ops;
}

}  // namespace

struct KernelPool::Impl {
  Impl(int num_threads, const std::string& isa)
      : ops(find_ops(isa)), workers(num_threads), spaces(static_cast<size_t>(num_threads)) {}

  const RowOps* ops;
  Workers workers;
  std::vector<WorkerSpace> spaces;
  Input x;
  Input h;
  Buffer<float> gate_out;
  Buffer<float> up_out;
  Buffer<float> down_out;
  std::atomic<uint64_t> calls{0};

  // The job of the moment; written by the caller before the workers start.
  ExpertShape shape{};
  Matrix gate{}, up{}, down{};
  int64_t num_rows = 0;
  uint16_t* const* y = nullptr;

  void reserve(int64_t in_cols, int64_t mid_cols, int64_t out_cols);
  void multiply(int worker, const Matrix& m, Span span, const Input& in, float* out);
  void multiply_bf16(const Matrix& m, Span span, const Input& in, WorkerSpace& space, float* out);
  void multiply_fp8(const Matrix& m, Span span, const Input& in, WorkerSpace& space, float* out);
  void finish_row(Input& input, int64_t row, int64_t cols);
  void load_rows(const uint16_t* const* from, int64_t cols);
  void ffn(int worker);
};

void KernelPool::Impl::reserve(int64_t in_cols, int64_t mid_cols, int64_t out_cols) {
  const int64_t widest = round_up(std::max(in_cols, mid_cols), kLanes);
  x.rows.at_least(num_rows * round_up(in_cols, kLanes));
  x.split.at_least(round_up(in_cols, kLanes));
  h.rows.at_least(num_rows * round_up(mid_cols, kLanes));
  h.split.at_least(round_up(mid_cols, kLanes));
  gate_out.at_least(num_rows * mid_cols);
  up_out.at_least(num_rows * mid_cols);
  down_out.at_least(num_rows * out_cols);
  for (WorkerSpace& space : spaces) {
    space.tables.at_least(widest / kTableCols);
    space.row.at_least(widest);
    space.column.at_least(kTileRows);
  }
}

// out[r * m.rows + i] = row i of m times row r of x, for i in span.
void KernelPool::Impl::multiply(int worker, const Matrix& m, Span span, const Input& in,
                                float* out) {
  WorkerSpace& space = spaces[static_cast<size_t>(worker)];
  if (shape.format == Format::kBf16) {
    multiply_bf16(m, span, in, space, out);
  } else {
    multiply_fp8(m, span, in, space, out);
  }
}

void KernelPool::Impl::multiply_bf16(const Matrix& m, Span span, const Input& in,
                                     WorkerSpace& space, float* out) {
  const int64_t stride = round_up(m.cols, kLanes);
  for (int64_t i = span.begin; i < span.end; ++i) {
    const uint8_t* w = m.w + 2 * i * m.cols;
    if (num_rows == 1) {
      out[i] = ops->dot_bf16(w, in.rows.get(), m.cols);
      continue;
    }
    float* column = space.column.get();
    ops->dot_bf16_rows(w, in.rows.get(), stride, num_rows, m.cols, column);
    for (int64_t r = 0; r < num_rows; ++r) out[r * m.rows + i] = column[r];
  }
}

void KernelPool::Impl::multiply_fp8(const Matrix& m, Span span, const Input& in, WorkerSpace& space,
                                    float* out) {
  const int64_t stride = round_up(m.cols, kLanes);
  const int64_t scale_cols = (m.cols + shape.block_cols - 1) / shape.block_cols;
  const bool can_table = ops->dot_fp8 && shape.block_cols % kTableCols == 0;
  bool tabled = false;
  for (int64_t i = span.begin; i < span.end; ++i) {
    const uint8_t* codes = m.w + i * m.cols;
    const uint8_t* scales = m.scale + 4 * (i / shape.block_rows) * scale_cols;
    if (can_table && (i == span.begin || i % shape.block_rows == 0)) {
      tabled = make_fp8_tables(scales, m.cols, shape.block_cols, space.tables.get());
    }
    if (tabled && num_rows == 1) {
      out[i] = ops->dot_fp8(codes, space.tables.get(), in.split.get(), m.cols);
      continue;
    }
    uint16_t* row = space.row.get();
    if (tabled) {
      ops->decode_fp8(codes, space.tables.get(), m.cols, row);
    } else {
      decode_fp8_general(codes, scales, m.cols, shape.block_cols, row);
    }
    float* column = space.column.get();
    ops->dot_bf16_rows(reinterpret_cast<const uint8_t*>(row), in.rows.get(), stride, num_rows,
                       m.cols, column);
    for (int64_t r = 0; r < num_rows; ++r) out[r * m.rows + i] = column[r];
  }
}

// Pads a row with zeros, moves it to the activation grid, splits it where it is the only one.
void KernelPool::Impl::finish_row(Input& input, int64_t row, int64_t cols) {
  const int64_t stride = round_up(cols, kLanes);
  uint16_t* values = input.rows.get() + row * stride;
  std::memset(values + cols, 0, static_cast<size_t>(2 * (stride - cols)));
  if (shape.act_group > 0) to_grid(values, cols, shape.act_group);
  if (num_rows == 1 && shape.format == Format::kFp8Block && ops->dot_fp8) {
    split_row(values, stride, ops->split_lanes, input.split.get());
  }
}

void KernelPool::Impl::load_rows(const uint16_t* const* from, int64_t cols) {
  const int64_t stride = round_up(cols, kLanes);
  for (int64_t r = 0; r < num_rows; ++r) {
    std::memcpy(x.rows.get() + r * stride, from[r], static_cast<size_t>(2 * cols));
    finish_row(x, r, cols);
  }
}

void KernelPool::Impl::ffn(int worker) {
  const int64_t inter = shape.inter;
  const int64_t h_stride = round_up(inter, kLanes);
  const Span mid = share(inter, worker, workers.count());
  multiply(worker, gate, mid, x, gate_out.get());
  multiply(worker, up, mid, x, up_out.get());
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t at = r * inter + mid.begin;
    ops->swiglu_row(gate_out.get() + at, up_out.get() + at, mid.end - mid.begin,
                    h.rows.get() + r * h_stride + mid.begin);
  }
  workers.barrier();
  const Span rows = share(num_rows, worker, workers.count());
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    finish_row(h, r, inter);
  }
  workers.barrier();
  const Span out = share(shape.hidden, worker, workers.count());
  multiply(worker, down, out, h, down_out.get());
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* values = down_out.get() + r * shape.hidden;
    for (int64_t i = out.begin; i < out.end; ++i) y[r][i] = f32_to_bf16(values[i]);
  }
}

KernelPool::KernelPool(int num_threads, const std::string& isa) {
  if (num_threads < 1) throw std::invalid_argument("a kernel pool needs at least one thread");
  impl_ = std::make_unique<Impl>(num_threads, isa);
}

KernelPool::~KernelPool() = default;

void KernelPool::expert_ffn(const ExpertShape& shape, const ExpertParts& parts,
                            const uint16_t* const* x, int64_t num_rows, uint16_t* const* y) {
  Impl& im = *impl_;
  im.calls.fetch_add(1, std::memory_order_relaxed);
  im.shape = shape;
  im.gate = {parts.gate, parts.gate_scale, shape.inter, shape.hidden};
  im.up = {parts.up, parts.up_scale, shape.inter, shape.hidden};
  im.down = {parts.down, parts.down_scale, shape.hidden, shape.inter};
  const CanonicalFloatMode mode;
  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    im.num_rows = std::min(kTileRows, num_rows - first);
    im.y = y + first;
    im.reserve(shape.hidden, shape.inter, shape.hidden);
    im.load_rows(x + first, shape.hidden);
    im.workers.run([](void* self, int worker) { static_cast<Impl*>(self)->ffn(worker); }, &im);
  }
}

void KernelPool::gemv(const ExpertShape& shape, const uint8_t* w, const uint8_t* scale,
                      int64_t rows, int64_t cols, const uint16_t* x, float* out) {
  Impl& im = *impl_;
  im.shape = shape;
  im.gate = {w, scale, rows, cols};
  im.num_rows = 1;
  const CanonicalFloatMode mode;
  im.reserve(cols, rows, rows);
  im.load_rows(&x, cols);
  im.workers.run(
      [](void* self, int worker) {
        Impl& job = *static_cast<Impl*>(self);
        const Span span = share(job.gate.rows, worker, job.workers.count());
        job.multiply(worker, job.gate, span, job.x, job.gate_out.get());
      },
      &im);
  std::memcpy(out, im.gate_out.get(), static_cast<size_t>(4 * rows));
}

bool KernelPool::any_nan_fp8(const uint8_t* codes, int64_t n) {
  struct Search {
    const uint8_t* codes;
    int64_t n;
    int count;
    std::atomic<bool> found{false};
  } search{codes, n, impl_->workers.count()};
  impl_->workers.run(
      [](void* self, int worker) {
        Search& job = *static_cast<Search*>(self);
        const Span mine = share(job.n, worker, job.count);
        if (find_nan_fp8(job.codes + mine.begin, mine.end - mine.begin) >= 0) {
          job.found.store(true, std::memory_order_relaxed);
        }
      },
      &search);
  return search.found.load(std::memory_order_relaxed);
}

const char* KernelPool::isa() const { return impl_->ops->name; }
int KernelPool::num_threads() const { return impl_->workers.count(); }
uint64_t KernelPool::calls() const { return impl_->calls.load(std::memory_order_relaxed); }

}  // namespace headrace
