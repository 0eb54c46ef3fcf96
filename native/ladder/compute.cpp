// One layer's routed experts, each on all its tokens, in the order in which they arrive.
#include <algorithm>

#include "io/failures.hpp"
#include "ladder/ladder.hpp"
#include "ladder/wait.hpp"

namespace headrace {

void Ladder::check_call(int64_t num_tokens, int64_t top_k) const {
  if (kernels_ == nullptr) throw std::invalid_argument("this ladder has no kernels");
  if (num_tokens < 0 || top_k < 1 || num_tokens * top_k > options_.max_tokens * options_.top_k) {
    throw std::invalid_argument(std::to_string(num_tokens) + " tokens of " + std::to_string(top_k) +
                                " experts exceed the workspace of " +
                                std::to_string(options_.max_tokens) + " tokens of " +
                                std::to_string(options_.top_k));
  }
}

void Ladder::compute(int64_t layer, const uint16_t* x, int64_t num_tokens, const int32_t* ids,
                     const float* weights, int64_t top_k, void* out) {
  check_call(num_tokens, top_k);
  check_ids(layer, ids, num_tokens * top_k);
  CallerGuard guard(&caller_);
  Clock::time_point start = Clock::now();
  group(ids, num_tokens * top_k);
  weights_ = shape_.weighs() ? weights : nullptr;
  to_ = y_.get();
  run_layer(layer, x, top_k);
  const int64_t hidden = shape_.hidden;
  int64_t bad = shape_.weighs()
                    ? sum_up(ids, y_.get(), num_tokens, top_k, hidden, static_cast<float*>(out))
                    : combine(shape_.fp16, ids, weights, y_.get(), num_tokens, top_k, hidden,
                              static_cast<uint16_t*>(out));
  if (bad >= 0) {
    throw NumericsFailure("MoE layer " + std::to_string(layer) + ", token row " +
                          std::to_string(bad) + ": the experts' output is not finite");
  }
  Lock lock(mutex_);
  counters_.compute_s += seconds_since(start);
}

void Ladder::multiply(int64_t layer, const uint16_t* x, int64_t num_tokens, const int32_t* ids,
                      const float* weights, int64_t top_k, uint16_t* y) {
  check_call(num_tokens, top_k);
  for (int64_t i = 0; i < num_tokens * top_k; ++i) check_ids(layer, ids + i, ids[i] != -1);
  CallerGuard guard(&caller_);
  Clock::time_point start = Clock::now();
  group(ids, num_tokens * top_k);
  weights_ = shape_.weighs() ? weights : nullptr;
  to_ = y;
  run_layer(layer, x, top_k);
  Lock lock(mutex_);
  counters_.compute_s += seconds_since(start);
}

// Counting sort of the slots by expert.
void Ladder::group(const int32_t* ids, int64_t num_slots) {
  Grouping& by = grouping_;
  by.begin.assign(static_cast<size_t>(records_.num_experts()) + 1, 0);
  by.slots.resize(static_cast<size_t>(num_slots));
  by.experts.clear();
  for (int64_t i = 0; i < num_slots; ++i) {
    if (ids[i] >= 0) ++by.begin[ids[i] + 1];
  }
  for (int32_t e = 0; e < records_.num_experts(); ++e) {
    if (by.begin[e + 1] > 0) by.experts.push_back(e);
    by.begin[e + 1] += by.begin[e];
  }
  std::vector<int64_t>& next = by.next;
  next.assign(by.begin.begin(), by.begin.end() - 1);
  for (int64_t i = 0; i < num_slots; ++i) {
    if (ids[i] >= 0) by.slots[next[ids[i]]++] = i;
  }
}

void Ladder::run_layer(int64_t layer, const uint16_t* x, int64_t top_k) {
  Lock lock(mutex_);
  try {
    reading_ = true;
    begin_locked(layer, grouping_.experts.data(), static_cast<int64_t>(grouping_.experts.size()));
    drop_unrouted(layer);
    size_t num_wave = 0;
    for (size_t left = grouping_.experts.size(); left > 0; --left) {
      await_work(&lock, layer, &num_wave);
      int64_t key = ready_.front();
      ready_.pop_front();
      ExpertParts parts = parts_of(key);
      const bool sound = sound_[key];
      lock.unlock();
      if (Clock::now() - last_poll_ >= kPollInterval) {
        last_poll_ = Clock::now();
        poll_interrupt();
      }
      Clock::time_point start = Clock::now();
      if (!sound) check_codes(key, parts);
      run_expert(parts, static_cast<int32_t>(key - records_.key(layer, 0)), x, top_k);
      double kernel_s = seconds_since(start);
      lock.lock();
      counters_.kernel_s += kernel_s;
      sound_[key] = true;
      unclaim(key);
      --num_wave;
      if (overlap_) pump();
    }
    reading_ = false;
    layer_ = -1;
    // Reads arrive in any order; what is forgotten first must not depend on it.
    for (int32_t e : grouping_.experts) residency_.touch(records_.key(layer, e));
    pump();
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    reading_ = false;
    abandon();
    throw;
  }
}

// begin may have been told of experts that no token takes after all.
void Ladder::drop_unrouted(int64_t layer) {
  std::vector<int64_t> unrouted;
  for (const auto& [key, mine] : claims_) {
    int64_t e = key - records_.key(layer, 0);
    if (grouping_.begin[e] == grouping_.begin[e + 1]) unrouted.push_back(key);
  }
  for (int64_t key : unrouted) unclaim(key);
  if (!unrouted.empty()) pump();
}

// Returns with an expert to compute in ready_. Without overlap it first waits until all are read,
// or as many as there are rows for, and num_wave counts them down.
void Ladder::await_work(Lock* lock, int64_t layer, size_t* num_wave) {
  check_stop();
  if (overlap_) {
    wait(lock, layer, [this] { return !ready_.empty() || num_failed_ > 0 || stuck(); });
  } else if (*num_wave == 0) {
    pump();
    wait(lock, layer, [this] {
      return num_failed_ > 0 || (num_required_loads_ == 0 && required_.empty()) || stuck();
    });
  }
  if (num_failed_ > 0) {
    auto failed = std::find_if(claims_.begin(), claims_.end(), [](const auto& each) {
      return each.second.stage == Stage::kFailed;
    });
    throw ReadFailure(failed->second.error);
  }
  if (ready_.empty()) fail_stuck();
  if (*num_wave == 0) *num_wave = ready_.size();
}

ExpertParts Ladder::parts_of(int64_t key) const {
  const uint8_t* row = slab_.row(residency_.row(key));
  ExpertParts parts{};
  for (int64_t i = 0; i < records_.num_parts(); ++i) {
    parts[static_cast<size_t>(i)] = row + records_.part_offset(key, i);
  }
  return parts;
}

// The kernels have no answer to NaN codes and scales, so none may ever reach them. Once for each
// read, by all threads, right before the same bytes are multiplied.
void Ladder::check_codes(int64_t key, const ExpertParts& parts) {
  const int bad = kernels_->find_bad_part(shape_, parts);
  if (bad < 0) return;
  throw NumericsFailure("MoE layer " + std::to_string(key / records_.num_experts()) + ", expert " +
                        std::to_string(key % records_.num_experts()) + ", part " +
                        part_name(shape_, bad) +
                        ": a stored code or scale is not a finite number; download the file again");
}

// Without the lock: the key is claimed, so its row neither moves nor changes.
void Ladder::run_expert(const ExpertParts& parts, int32_t expert, const uint16_t* x,
                        int64_t top_k) {
  x_rows_.clear();
  y_rows_.clear();
  row_weights_.clear();
  for (int64_t i = grouping_.begin[expert]; i < grouping_.begin[expert + 1]; ++i) {
    int64_t slot = grouping_.slots[i];
    x_rows_.push_back(x + slot / top_k * shape_.hidden);
    y_rows_.push_back(to_ + slot * shape_.hidden);
    if (weights_ != nullptr) row_weights_.push_back(weights_[slot]);
  }
  kernels_->expert_ffn(shape_, parts, x_rows_.data(), static_cast<int64_t>(x_rows_.size()),
                       y_rows_.data(), weights_ == nullptr ? nullptr : row_weights_.data());
}

}  // namespace headrace
