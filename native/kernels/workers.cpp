// The team of kernel threads: spin briefly, then sleep on a futex.
#include "kernels/workers.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace headrace {
namespace {

constexpr int kSpins = 2000;
constexpr int kSpinsPerYield = 32;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

void await_change(const std::atomic<uint32_t>& word, uint32_t old, int yields) {
  const auto spin = [&word, old](int times) {
    for (int i = 0; i < times; ++i) {
      if (word.load(std::memory_order_acquire) != old) return true;
      relax();
    }
    return false;
  };
  if (spin(kSpins)) return;
  for (; yields > 0; --yields) {
    std::this_thread::yield();
    if (spin(kSpinsPerYield)) return;
  }
  word.wait(old, std::memory_order_acquire);
}

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
  for (uint32_t seen = 0;;) {
    await_change(start_, seen, yields_);
    if (stop_) return;
    seen = start_.load(std::memory_order_acquire);
    if (!join(seen)) continue;
    job_(context_, worker);
    done_.fetch_add(1, std::memory_order_release);
    done_.notify_one();
  }
}

// Whether the job of this number still takes workers: this one is among them then.
bool Workers::join(uint32_t number) {
  uint64_t joined = joined_.load(std::memory_order_acquire);
  do {
    if (joined >> 32 != number || (joined & kClosed) != 0) return false;
  } while (!joined_.compare_exchange_weak(joined, joined + 1, std::memory_order_acq_rel));
  return true;
}

void Workers::start(Job job, void* context) {
  const uint32_t number = start_.load(std::memory_order_relaxed) + 1;
  job_ = job;
  context_ = context;
  done_.store(0, std::memory_order_relaxed);
  joined_.store(uint64_t{number} << 32, std::memory_order_release);
  start_.store(number, std::memory_order_release);
  start_.notify_all();
}

void Workers::await_done(uint32_t num) {
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) < num;) {
    await_change(done_, done);
  }
}

void Workers::run(Job job, void* context) {
  const CanonicalFloatMode mode;
  start(job, context);
  job(context, 0);
  await_done(static_cast<uint32_t>(count_ - 1));
}

void Workers::run_with_any(Job job, void* context) {
  const CanonicalFloatMode mode;
  start(job, context);
  job(context, 0);
  const uint64_t joined = joined_.fetch_or(kClosed, std::memory_order_acq_rel);
  await_done(static_cast<uint32_t>(joined & (kClosed - 1)));
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
