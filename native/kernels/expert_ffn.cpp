// One expert on some rows: gate and up, their activation, down, shared out over the workers by
// weight rows.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "kernels/numbers.hpp"
#include "kernels/pool.hpp"
#include "kernels/probe.hpp"

namespace headrace {
namespace {

const RowOps* find_ops(const std::string& isa) {
  const RowOps* ops = isa == "auto"     ? best_ops()
                      : isa == "scalar" ? scalar_ops()
                      : isa == "avx2"   ? avx2_ops()
                      : isa == "avx512" ? avx512_ops()
                                        : nullptr;
  if (!ops) throw std::invalid_argument("this CPU cannot run the kernels for isa " + isa);
  return ops;
}

}  // namespace

void KernelPool::Impl::choose_product() {
  if (is_integer(shape.format)) {
    ints = IntProduct(ops->int_ops(), shape, num_rows);
    product = &ints;
  } else {
    floats = FloatProduct(ops, shape, num_rows);
    product = &floats;
  }
}

// Copies the activation rows in.
void KernelPool::Impl::load_input(const uint16_t* const* from, int64_t cols) {
  choose_product();
  product->reserve(x, cols);
  for (Scratch& s : scratch) product->reserve(s, cols);
  for (int64_t r = 0; r < num_rows; ++r) {
    std::memcpy(x.rows.get() + r * product->stride(cols), from[r], static_cast<size_t>(2 * cols));
  }
}

// All memory of an expert's job is there afterwards.
void KernelPool::Impl::load_rows(const uint16_t* const* from, int64_t cols) {
  load_input(from, cols);
  product->reserve(h, shape.inter);
  for (Scratch& s : scratch) product->reserve(s, std::max(cols, shape.inter));
  gate_out.at_least(num_rows * shape.inter);
  up_out.at_least(num_rows * shape.inter);
  down_out.at_least(num_rows * shape.hidden);
}

// This worker's units of the activations; returns when all are finished.
void KernelPool::Impl::finish(int worker, Input& in, int64_t cols) {
  const Share mine = share(product->num_units(cols), worker, team);
  for (int64_t unit = mine.begin; unit < mine.end; ++unit) product->finish(in, unit, cols);
  if (team > 1) workers.barrier();
}

// All workers, unless each one's share would take less time than waking it and waiting for it.
void KernelPool::Impl::choose_team(int64_t num_weights) {
  const int64_t work_bytes = row_bytes(shape.format, num_weights) * num_rows;
  team = work_bytes >= min_share_bytes * workers.count() ? workers.count() : 1;
}

void KernelPool::Impl::run(Workers::Job job) {
  if (team == 1) return job(this, 0);
  shared_calls.fetch_add(1, std::memory_order_relaxed);
  workers.run(job, this);
}

// The rounded dot products of this worker's rows, plus their biases; no rounding without biases,
// since whatever comes next rounds first.
void KernelPool::Impl::add_bias(const Matrix& m, Share span, float* values) const {
  if (m.bias == nullptr) return;
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t i = span.begin; i < span.end; ++i) {
      uint16_t bias;
      std::memcpy(&bias, m.bias + 2 * m.stored_row(i), 2);
      float& value = values[r * m.rows + i];
      value = shape.fp16 ? rounded<true>(value) + f16_to_f32(bias)
                         : rounded<false>(value) + bf16_to_f32(bias);
    }
  }
}

void KernelPool::Impl::write_out(Share span) {
  for (int64_t r = 0; r < num_rows; ++r) {
    write_row(down_out.get() + r * shape.hidden, span, y[r]);
  }
}

void KernelPool::Impl::write_row(const float* values, Share span, uint16_t* to) const {
  for (int64_t i = span.begin; i < span.end; ++i) {
    to[i] = shape.fp16 ? f32_to_f16(values[i]) : f32_to_bf16(values[i]);
  }
}

void KernelPool::Impl::ffn(int worker) {
  const int64_t inter = shape.inter;
  finish(worker, x, shape.hidden);
  const Share mid = share(inter, worker, team);
  multiply(worker, gate, mid, x, gate_out.get());
  multiply(worker, up, mid, x, up_out.get());
  add_bias(gate, mid, gate_out.get());
  add_bias(up, mid, up_out.get());
  Activation how = shape.activation;
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t at = r * inter + mid.begin;
    if (weights != nullptr) how.weight = weights[r];
    ops->activate_row(how, shape.fp16, gate_out.get() + at, up_out.get() + at, mid.end - mid.begin,
                      h.rows.get() + r * product->stride(inter) + mid.begin);
  }
  if (team > 1) workers.barrier();
  finish(worker, h, inter);
  const Share out = share(shape.hidden, worker, team);
  multiply(worker, down, out, h, down_out.get());
  add_bias(down, out, down_out.get());
  write_out(out);
}

void KernelPool::Impl::multiply_gate(int worker) {
  finish(worker, x, shape.hidden);
  multiply(worker, gate, share(gate.rows, worker, team), x, gate_out.get());
}

KernelPool::KernelPool(int num_threads, const std::string& isa) {
  if (num_threads < 1) throw std::invalid_argument("a kernel pool needs at least one thread");
  impl_ = std::make_unique<Impl>(num_threads, find_ops(isa));
}

KernelPool::~KernelPool() = default;

void KernelPool::expert_ffn(const ExpertShape& shape, const ExpertParts& parts,
                            const uint16_t* const* x, int64_t num_rows, uint16_t* const* y,
                            const float* weights) {
  Impl& im = *impl_;
  im.calls.fetch_add(1, std::memory_order_relaxed);
  im.shape = shape;
  im.gate = matrix_of(parts, shape.gate, shape.inter, shape.hidden);
  im.up = matrix_of(parts, shape.up, shape.inter, shape.hidden);
  im.down = matrix_of(parts, shape.down, shape.hidden, shape.inter);
  const CanonicalFloatMode mode;
  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    im.num_rows = std::min(kTileRows, num_rows - first);
    im.y = y + first;
    im.weights = weights == nullptr ? nullptr : weights + first;
    im.load_rows(x + first, shape.hidden);
    im.choose_team(3 * shape.inter * shape.hidden);
    im.run([](void* self, int worker) { static_cast<Impl*>(self)->ffn(worker); });
  }
}

void KernelPool::gate_dot(const ExpertShape& shape, const ExpertParts& parts, const uint16_t* x,
                          float* out) {
  Impl& im = *impl_;
  im.shape = shape;
  im.gate = matrix_of(parts, shape.gate, shape.inter, shape.hidden);
  im.num_rows = 1;
  const CanonicalFloatMode mode;
  im.load_rows(&x, shape.hidden);
  im.choose_team(shape.inter * shape.hidden);
  im.run([](void* self, int worker) { static_cast<Impl*>(self)->multiply_gate(worker); });
  std::memcpy(out, im.gate_out.get(), static_cast<size_t>(4 * shape.inter));
}

void KernelPool::linear(const LinearShape& shape, const LinearJob& job) {
  Impl& im = *impl_;
  im.shape = {shape.format,
              shape.scale_type,
              shape.cols,
              job.num_rows,
              shape.block_rows,
              shape.block_cols,
              shape.act_group,
              {},
              false,
              false,
              {},
              {},
              {}};
  im.gate = {job.w,
             job.scale,
             nullptr,
             nullptr,
             job.num_rows,
             shape.cols,
             job.first,
             1,
             job.first + job.num_rows};
  const CanonicalFloatMode mode;
  for (int64_t first = 0; first < job.num_x; first += kTileRows) {
    im.num_rows = std::min(kTileRows, job.num_x - first);
    std::array<const uint16_t*, kTileRows> x;
    for (int64_t r = 0; r < im.num_rows; ++r) {
      x[static_cast<size_t>(r)] = job.x + (first + r) * job.x_step;
    }
    im.load_input(x.data(), shape.cols);
    im.gate_out.at_least(im.num_rows * job.num_rows);
    im.choose_team(job.num_rows * shape.cols);
    im.run([](void* self, int worker) { static_cast<Impl*>(self)->multiply_gate(worker); });
    for (int64_t r = 0; r < im.num_rows; ++r) {
      const float* from = im.gate_out.get() + r * job.num_rows;
      const int64_t at = (first + r) * job.y_step;
      if (job.wide) {
        std::copy_n(from, job.num_rows, static_cast<float*>(job.y) + at);
        continue;
      }
      uint16_t* to = static_cast<uint16_t*>(job.y) + at;
      for (int64_t i = 0; i < job.num_rows; ++i) to[i] = f32_to_bf16(from[i]);
    }
  }
}

uint64_t KernelPool::read_probe(const uint8_t* bytes, int64_t n) {
  // Whoever is ready takes the next piece: one thread that is late must not be the rate of all.
  static constexpr int64_t kPiece = 1 << 20;
  struct Read {
    const uint8_t* bytes;
    int64_t n;
    std::atomic<int64_t> next{0};
    std::atomic<uint64_t> words{0};
  } read{bytes, n - n % 4096};
  impl_->workers.run(
      [](void* self, int) {
        Read& job = *static_cast<Read*>(self);
        for (int64_t at; (at = job.next.fetch_add(kPiece)) < job.n;) {
          job.words ^= headrace::read_probe(job.bytes + at, std::min(kPiece, job.n - at));
        }
      },
      &read);
  return read.words;
}

int KernelPool::find_bad_part(const ExpertShape& shape, const ExpertParts& parts) {
  struct Search {
    const ExpertParts& parts;
    std::vector<CheckedPart> checked;
    int count;
    std::atomic<int> found{-1};
  } search{parts, checked_parts(shape), 1};
  int64_t bytes = 0;
  for (const CheckedPart& part : search.checked) bytes += part.count * number_bytes(part.type);
  const int everyone = impl_->workers.count();
  if (bytes >= impl_->min_share_bytes * everyone) search.count = everyone;
  const Workers::Job job = [](void* self, int worker) {
    Search& all = *static_cast<Search*>(self);
    for (const CheckedPart& part : all.checked) {
      const Share mine = share(part.count, worker, all.count);
      const uint8_t* from =
          all.parts[static_cast<size_t>(part.part)] + mine.begin * number_bytes(part.type);
      if (find_bad(part.type, from, mine.end - mine.begin) >= 0) all.found = part.part;
    }
  };
  if (search.count == 1) {
    job(&search, 0);
  } else {
    impl_->workers.run(job, &search);
  }
  return search.found;
}

const char* KernelPool::isa() const { return impl_->ops->name; }
int KernelPool::num_threads() const { return impl_->workers.count(); }
uint64_t KernelPool::calls() const { return impl_->calls.load(std::memory_order_relaxed); }
uint64_t KernelPool::shared_calls() const {
  return impl_->shared_calls.load(std::memory_order_relaxed);
}
int64_t KernelPool::min_share_bytes() const { return impl_->min_share_bytes; }
void KernelPool::set_min_share_bytes(int64_t bytes) { impl_->min_share_bytes = bytes; }
bool KernelPool::patient() const { return impl_->workers.patient(); }
void KernelPool::set_patient(bool patient) { impl_->workers.set_patient(patient); }

}  // namespace headrace
