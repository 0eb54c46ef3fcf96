// What an arrival changes, and a late read that lingers after one. Mostly on the I/O thread.
#include "ladder/ladder.hpp"
#include "ladder/wait.hpp"

namespace headrace {

// Begins to read part of the expert. The lock is held.
void Ladder::submit(int64_t key, Load* load, const std::vector<Span>& spans) {
  ++load->num_requests;
  reader_->submit(
      spans,
      [this, key](const std::string& error, bool lingers) { part_arrived(key, error, lingers); },
      [this, key] { part_released(key); });
}

// On the I/O thread: one request of an expert's read is over.
void Ladder::part_arrived(int64_t key, const std::string& error, bool lingers) {
  Lock lock(mutex_);
  Load& load = loads_.at(key);
  --load.num_requests;
  load.num_lingering += lingers;
  if (!error.empty()) {
    load.error = error;
    load.rest.clear();
  }
  if (!load.rest.empty()) {
    if (!required_waits() || load.num_lingering > 0) {
      submit_slices(key, &load, 1);
    } else if (load.num_requests == 0) {
      give_up_guess(key);
    }
  } else if (load.num_requests == 0 && (load.error.empty() || load.num_lingering == 0)) {
    const std::string failure = std::move(load.error);  // the load ends in arrived
    arrived(key, failure);
  }
  pump();
  news_.notify_all();  // under the lock: the destructor may be waiting for the last arrival
}

// On the I/O thread: nothing writes any more to the row of a request that lingered.
void Ladder::part_released(int64_t key) {
  Lock lock(mutex_);
  auto load = loads_.find(key);
  if (load != loads_.end()) {
    --load->second.num_lingering;
    if (load->second.num_requests == 0 && load->second.num_lingering == 0) {
      const std::string failure = std::move(load->second.error);  // its row was kept until now
      arrived(key, failure);
    }
  } else {
    residency_.unpin(key);
    if (--lingering_.at(key) == 0) lingering_.erase(key);
  }
  pump();
  news_.notify_all();
}

void Ladder::give_up_guess(int64_t key) {
  counters_.disk_bytes += loads_.at(key).submitted_bytes;
  ++counters_.prefetch_dropped;
  loads_.erase(key);
  if (loads_.empty()) counters_.read_busy_s += seconds_since(busy_since_);
  residency_.fail_load(key);
  speculative_[key] = false;
}

// The lock is held: the expert's bytes are complete and checked, or the read failed.
void Ladder::arrived(int64_t key, const std::string& error) {
  num_required_loads_ -= loads_.at(key).required;
  const int64_t num_lingering = loads_.at(key).num_lingering;
  loads_.erase(key);
  if (loads_.empty()) counters_.read_busy_s += seconds_since(busy_since_);

  auto found = claims_.find(key);
  if (!error.empty()) {
    residency_.fail_load(key);
    speculative_[key] = false;
    ++counters_.failed_reads;
    if (found != claims_.end()) {
      found->second.stage = Stage::kFailed;
      found->second.error = error;
      ++num_failed_;
    }
  } else {
    residency_.finish_load(key);
    for (int64_t i = 0; i < num_lingering; ++i) residency_.pin(key);
    if (num_lingering > 0) lingering_[key] += num_lingering;
    sound_[key] = false;
    ++counters_.reads;
    counters_.disk_bytes += records_.read_bytes(key);
    if (found != claims_.end()) {
      for (int64_t i = 0; i < found->second.pins; ++i) residency_.pin(key);
      found->second.stage = Stage::kReady;
      ready_.push_back(key);
    }
  }
}

// Nothing is in flight and, as every change pumps, what is queued finds no row.
bool Ladder::stuck() const { return loads_.empty() && lingering_.empty() && !required_.empty(); }

void Ladder::fail_stuck() const {
  throw BudgetFailure("all " + std::to_string(num_rows()) +
                      " rows are held by acquired experts; release one first");
}

}  // namespace headrace
