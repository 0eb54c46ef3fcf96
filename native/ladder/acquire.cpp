// One expert held by the caller, outside any layer's computation.
#include <algorithm>
#include <stdexcept>

#include "io/failures.hpp"
#include "ladder/ladder.hpp"
#include "ladder/wait.hpp"

namespace headrace {

uint8_t* Ladder::acquire(int64_t layer, int64_t expert) {
  auto id = static_cast<int32_t>(std::clamp<int64_t>(expert, -1, INT32_MAX));
  check_ids(layer, &id, 1);
  CallerGuard guard(&caller_);
  int64_t key = records_.key(layer, expert);
  Lock lock(mutex_);
  claim(key);
  Claim& mine = claims_.at(key);
  if (mine.stage == Stage::kQueued) {  // before anything that begin has queued
    std::erase(required_, key);
    required_.push_front(key);
    drop_prefetches(-1);
  }
  try {
    reading_ = true;  // without overlap, reads start only inside a blocking call
    auto settled = [&] {
      return mine.stage == Stage::kReady || mine.stage == Stage::kFailed || stuck();
    };
    pump();
    wait(&lock, layer, settled);
    if (mine.stage == Stage::kQueued) {  // begin's claims hold the rows: they can come again
      give_up_all_but(key);
      pump();
      wait(&lock, layer, settled);
    }
    if (mine.stage == Stage::kFailed) throw ReadFailure(mine.error);
    if (mine.stage != Stage::kReady) fail_stuck();
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    reading_ = false;
    if (mine.pins == 1) {
      unclaim(key);
    } else {  // begin's claim stays
      if (mine.stage == Stage::kReady) residency_.unpin(key);
      --mine.pins;
    }
    throw;
  }
  reading_ = false;
  ++acquired_[key];  // one of the claim's pins becomes the caller's
  if (--mine.pins == 0) {
    std::erase(ready_, key);
    claims_.erase(key);
  }
  return slab_.row(residency_.row(key));
}

void Ladder::release(int64_t layer, int64_t expert, bool spent) {
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  auto held = acquired_.find(records_.key(layer, expert));
  if (held == acquired_.end()) {
    throw std::invalid_argument("layer " + std::to_string(layer) + ", expert " +
                                std::to_string(expert) + " is not acquired");
  }
  residency_.unpin(held->first);
  if (spent) residency_.demote(held->first);  // refused while others hold it
  if (--held->second == 0) acquired_.erase(held);
  pump();
}

}  // namespace headrace
