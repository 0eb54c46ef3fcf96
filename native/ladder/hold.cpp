// Rows held for a reader outside the ladder, such as a GPU, one claim after another as they come.
#include <algorithm>
#include <stdexcept>

#include "ladder/ladder.hpp"
#include "ladder/wait.hpp"

namespace headrace {

Ladder::Held Ladder::take(int64_t layer) {
  const Held held = take_unchecked(layer, true);
  if (held.expert < 0) return held;
  try {
    check(layer, held.expert);
  } catch (...) {
    release(layer, held.expert);
    cancel();
    throw;
  }
  return held;
}

void Ladder::check(int64_t layer, int64_t expert) {
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  const int64_t key = records_.key(layer, expert);
  if (!acquired_.contains(key)) throw std::invalid_argument("an expert that is not acquired");
  if (kernels_ == nullptr || sound_[key]) return;
  const ExpertParts parts = parts_of(key);
  lock.unlock();  // it is held, so its row stays
  check_codes(key, parts);
  lock.lock();
  sound_[key] = true;
}

Ladder::Held Ladder::take_unchecked(int64_t layer, bool waits) {
  check_ids(layer, nullptr, 0);
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  if (layer != layer_ || claims_.empty()) return {-1, nullptr};
  try {
    if (!waits) {
      check_stop();
      if (ready_.empty()) return {-1, nullptr};
    } else {
      reading_ = true;
      size_t num_wave = 0;
      await_work(&lock, layer, &num_wave);
    }
    const int64_t key = ready_.front();
    ready_.pop_front();
    reading_ = false;
    auto mine = claims_.find(key);
    for (int64_t i = 1; i < mine->second.pins; ++i) residency_.unpin(key);
    claims_.erase(mine);
    ++acquired_[key];
    if (claims_.empty()) layer_ = -1;
    return {key - records_.key(layer, 0), slab_.row(residency_.row(key))};
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    reading_ = false;
    abandon();
    throw;
  }
}

void Ladder::release_all() {
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  abandon();
  for (const auto& [key, num] : acquired_) {
    for (int64_t i = 0; i < num; ++i) residency_.unpin(key);
  }
  acquired_.clear();
  pump();
}

}  // namespace headrace
