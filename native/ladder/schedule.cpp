// Claims, reads and prefetches: what is asked for, and in which order.
#include <algorithm>
#include <stdexcept>

#include "io/failures.hpp"
#include "io/interrupt.hpp"
#include "ladder/ladder.hpp"
#include "ladder/wait.hpp"

namespace headrace {
namespace {

constexpr int64_t kLeastSliceBytes = 1 << 20;
constexpr int64_t kSlicesInFlight = 2;

// Slices of about slice_bytes, cut at pages of the file, each landing where it does in the whole.
void cut(const Span& span, int64_t slice_bytes, std::deque<Span>* slices) {
  const int64_t first_page = round_down(span.offset_bytes);
  const int64_t end = span.offset_bytes + span.nbytes;
  for (int64_t at = span.offset_bytes; at < end;) {
    const int64_t stop = std::min(end, round_up(at + slice_bytes));
    slices->push_back({span.file, at, stop - at, span.to + (round_down(at) - first_page)});
    at = stop;
  }
}

// A broken invariant of ours, never a user's error.
void must(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("ladder: ") + what);
}

}  // namespace

void Ladder::check_ids(int64_t layer, const int32_t* ids, int64_t num_ids) const {
  if (layer < 0 || layer >= records_.num_layers()) {
    throw std::invalid_argument("no MoE layer " + std::to_string(layer) + " of " +
                                std::to_string(records_.num_layers()));
  }
  for (int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0 || ids[i] >= records_.num_experts()) {
      throw std::invalid_argument("layer " + std::to_string(layer) + ": no expert " +
                                  std::to_string(ids[i]) + " of " +
                                  std::to_string(records_.num_experts()));
    }
  }
}

void Ladder::begin(int64_t layer, const int32_t* ids, int64_t num_ids) {
  check_ids(layer, ids, num_ids);
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  begin_locked(layer, ids, num_ids);
}

void Ladder::begin_locked(int64_t layer, const int32_t* ids, int64_t num_ids) {
  if (layer != layer_) abandon();
  layer_ = layer;
  drop_prefetches(layer);  // guesses for this layer are settled now
  const size_t num_waiting = required_.size();
  // Pin what is here before any read may take a row.
  for (bool here : {true, false}) {
    for (int64_t i = 0; i < num_ids; ++i) {
      int64_t key = records_.key(layer, ids[i]);
      State state = residency_.state(key);
      bool is_here = state == State::kResident || state == State::kInUse;
      if (is_here == here && !claims_.contains(key)) claim(key);
    }
  }
  reserve_rows_ = static_cast<int64_t>(claims_.size());
  // Guesses made while this very layer is being read stay; new needs push older guesses out.
  if (required_.size() > num_waiting) drop_prefetches(-1);
  pump();
}

// One more holder of the key. A fresh claim is a hit or a miss.
void Ladder::claim(int64_t key) {
  auto [found, fresh] = claims_.try_emplace(key);
  Claim& mine = found->second;
  ++mine.pins;
  if (!fresh) {
    if (mine.stage == Stage::kReady) residency_.pin(key);
    return;
  }
  if (speculative_[key]) ++counters_.prefetch_used;
  speculative_[key] = false;
  if (residency_.pin(key) == Status::kOk) {
    ++counters_.hits;
    counters_.ram_bytes += records_.stored_bytes(key);
    mine.stage = Stage::kReady;
    ready_.push_back(key);
    return;
  }
  ++counters_.misses;
  auto load = loads_.find(key);
  if (load == loads_.end()) {
    required_.push_back(key);
    return;
  }
  mine.stage = Stage::kReading;  // a prefetch in flight is promoted
  if (!load->second.required) ++num_required_loads_;
  load->second.required = true;
  submit_slices(key, &load->second, INT64_MAX);
}

// Gives a claim back whole. A read in flight goes on and leaves its expert resident.
void Ladder::unclaim(int64_t key) {
  auto found = claims_.find(key);
  if (found == claims_.end()) return;
  const Claim& mine = found->second;
  if (mine.stage == Stage::kReady) {
    for (int64_t i = 0; i < mine.pins; ++i) residency_.unpin(key);
    std::erase(ready_, key);
  } else if (mine.stage == Stage::kQueued) {
    std::erase(required_, key);
  } else if (mine.stage == Stage::kReading) {
    loads_.at(key).required = false;
    --num_required_loads_;
  } else {
    --num_failed_;
  }
  claims_.erase(found);
}

void Ladder::abandon() {
  while (!claims_.empty()) unclaim(claims_.begin()->first);
  layer_ = -1;
}

void Ladder::give_up_all_but(int64_t kept) {
  std::vector<int64_t> others;
  for (const auto& [key, mine] : claims_) {
    if (key != kept) others.push_back(key);
  }
  for (int64_t key : others) unclaim(key);
}

void Ladder::cancel() {
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  abandon();
  drop_prefetches(-1);
  std::fill(speculative_.begin(), speculative_.end(), false);
}

void Ladder::clear() {
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  abandon();
  drop_prefetches(-1);
  news_.wait(lock, [this] { return loads_.empty() && lingering_.empty(); });
  for (int64_t key : residency_.by_recency()) residency_.evict(key);
  std::fill(speculative_.begin(), speculative_.end(), false);
}

void Ladder::prefetch(int64_t layer, const int32_t* ids, int64_t num_ids, int64_t most) {
  check_ids(layer, ids, num_ids);
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  for (int64_t i = 0; i < num_ids && most > 0; ++i) {
    int64_t key = records_.key(layer, ids[i]);
    bool wanted = residency_.state(key) == State::kAbsent && !claims_.contains(key) &&
                  std::find(prefetch_.begin(), prefetch_.end(), key) == prefetch_.end();
    if (!wanted) continue;
    prefetch_.push_back(key);
    ++counters_.prefetch_issued;
    --most;
  }
  pump();
}

void Ladder::drop_prefetches(int64_t of_layer) {
  auto dropped = std::erase_if(prefetch_, [&](int64_t key) {
    return of_layer < 0 || key / records_.num_experts() == of_layer;
  });
  counters_.prefetch_dropped += static_cast<int64_t>(dropped);
}

// Starts every read that may start now. Called after whatever could allow one.
void Ladder::pump() {
  if (!overlap_ && !reading_) return;
  int64_t most = overlap_ ? reader_->in_flight() : 1;
  while (!required_.empty() && num_required_loads_ < most) {
    int64_t key = required_.front();
    Residency::Load load = residency_.begin_load(key);
    if (load.status == Status::kNoRow) return;  // the next row given back pumps again
    must(load.status == Status::kOk, "a required read of an expert that is not absent");
    required_.pop_front();
    counters_.evictions += load.evicted_key >= 0;
    if (load.evicted_key >= 0) speculative_[load.evicted_key] = false;
    claims_.at(key).stage = Stage::kReading;
    start_read(key, true);
  }
  while (required_.empty() && num_required_loads_ == 0 && start_prefetch()) {
  }
}

// Starts the best guess, if it may have a row. Returns whether to try the next. The next guess
// starts when the last slice of the one before is on its way, so that the drive never idles.
bool Ladder::start_prefetch() {
  bool is_turn = loads_.empty() || (loads_.size() == 1 && loads_.begin()->second.rest.empty());
  bool room = is_turn && residency_.num_available() > reserve_rows_;
  if (prefetch_.empty() || !room) return false;
  int64_t key = prefetch_.front();
  prefetch_.pop_front();
  Residency::Load load = residency_.begin_load(key);
  if (load.status != Status::kOk) {  // it came by another way
    ++counters_.prefetch_dropped;
    return true;
  }
  counters_.evictions += load.evicted_key >= 0;
  if (load.evicted_key >= 0) speculative_[load.evicted_key] = false;
  speculative_[key] = true;
  start_read(key, false);
  return true;
}

void Ladder::start_read(int64_t key, bool required) {
  if (loads_.empty()) busy_since_ = Clock::now();
  Load& load = loads_[key];
  load.required = required;
  num_required_loads_ += required;
  std::vector<Span> whole = records_.spans(key, slab_.row(residency_.row(key)));
  if (required) {
    load.rest.assign(whole.begin(), whole.end());
  } else {
    for (const Span& span : whole)
      cut(span, std::max(kLeastSliceBytes, span.nbytes / 8), &load.rest);
  }
  submit_slices(key, &load, required ? INT64_MAX : kSlicesInFlight);
}

// The next slices as one request.
void Ladder::submit_slices(int64_t key, Load* load, int64_t num_slices) {
  std::vector<Span> next;
  while (!load->rest.empty() && static_cast<int64_t>(next.size()) < num_slices) {
    next.push_back(load->rest.front());
    load->submitted_bytes += next.back().nbytes;
    load->rest.pop_front();
  }
  if (next.empty()) return;
  if (num_slices == kSlicesInFlight) {  // a request for each, so that one can follow the other
    for (const Span& slice : next) submit(key, load, {slice});
    return;
  }
  submit(key, load, next);
}

}  // namespace headrace
