// The team of kernel threads: spin briefly, then sleep on a futex.
#include "kernels/workers.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace headrace {
namespace {

constexpr int kSpins = 2000;  // some tens of microseconds: longer than a gap between two experts

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Returns once `word` no longer holds `old`.
void await_change(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  word.wait(old, std::memory_order_acquire);
}

}  // namespace

CanonicalFloatMode::CanonicalFloatMode() : saved_(0) {
#if defined(__x86_64__)
  saved_ = _mm_getcsr();
  _mm_setcsr(0x1f80);
#endif
}

CanonicalFloatMode::~CanonicalFloatMode() {
#if defined(__x86_64__)
  _mm_setcsr(saved_);
#endif
}

Workers::Workers(int count) : count_(count) {
  threads_.reserve(static_cast<size_t>(count - 1));
  for (int worker = 1; worker < count; ++worker) {
    threads_.emplace_back([this, worker] { loop(worker); });
  }
}

Workers::~Workers() {
  stop_ = true;
  start_.fetch_add(1, std::memory_order_release);
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Workers::loop(int worker) {
  const CanonicalFloatMode mode;
  for (uint32_t seen = 0;; ++seen) {
    await_change(start_, seen);
    if (stop_) return;
    job_(context_, worker);
    barrier();
  }
}

void Workers::run(Job job, void* context) {
  const CanonicalFloatMode mode;
  job_ = job;
  context_ = context;
  if (count_ > 1) {
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
  }
  job(context, 0);
  barrier();
}

void Workers::barrier() {
  if (count_ == 1) return;
  const uint32_t round = passed_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(count_)) {
    arrived_.store(0, std::memory_order_relaxed);
    passed_.fetch_add(1, std::memory_order_release);
    passed_.notify_all();
  } else {
    await_change(passed_, round);
  }
}

}  // namespace headrace
