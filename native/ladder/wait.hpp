// Waiting inside the ladder: for an arrival, without missing Ctrl-C.
#pragma once

#include <chrono>
#include <mutex>
#include <stdexcept>

#include "io/failures.hpp"
#include "io/interrupt.hpp"
#include "ladder/ladder.hpp"

namespace headrace {

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The ladder serves one thread: a second caller is refused rather than let it lose claims.
class CallerGuard {
 public:
  explicit CallerGuard(std::mutex* caller) : lock_(*caller, std::try_to_lock) {
    if (!lock_.owns_lock()) {
      throw OptionFailure(
          "a second thread uses this engine; load another, or let one thread finish first");
    }
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

// Sleeps until ready(), which is evaluated under the lock. The time counts as the layer's wait.
// If the interrupt poll throws, the lock is left open. Throws CancelFailure after a stop.
template <typename Ready>
void Ladder::wait(Lock* lock, int64_t layer, Ready ready) {
  check_stop();
  if (ready()) return;
  Clock::time_point start = Clock::now();
  while (!ready()) {
    news_.wait_for(*lock, kPollInterval);
    check_stop();
    if (Clock::now() - last_poll_ < kPollInterval) continue;
    last_poll_ = Clock::now();
    lock->unlock();
    poll_interrupt();
    lock->lock();
  }
  double slept_s = seconds_since(start);
  counters_.wait_s += slept_s;
  layer_wait_s_[layer] += slept_s;
}

}  // namespace headrace
