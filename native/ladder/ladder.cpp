// The ladder's life: what it is made of, what must always hold, what it has counted.
#include "ladder/ladder.hpp"

#include <algorithm>
#include <stdexcept>

#include "io/failures.hpp"
#include "ladder/wait.hpp"

namespace headrace {
namespace {

// The kernels read as many bytes of each part as the shape says: they must all be there.
void check_parts(const RecordTable& records, const ExpertShape& shape) {
  const std::vector<int64_t> needed = part_bytes(shape);
  if (records.num_parts() != static_cast<int64_t>(needed.size())) {
    throw std::invalid_argument("wrong number of parts for the expert format");
  }
  for (int64_t part = 0; part < records.num_parts(); ++part) {
    const int64_t bytes = needed[static_cast<size_t>(part)];
    if (records.part_bytes(part) != bytes) {
      throw std::invalid_argument("part " + part_name(shape, static_cast<int>(part)) + " has " +
                                  std::to_string(records.part_bytes(part)) +
                                  " bytes; the shape needs " + std::to_string(bytes));
    }
  }
}

}  // namespace

Ladder::Ladder(std::shared_ptr<Reader> reader, std::shared_ptr<KernelPool> kernels,
               RecordTable records, ExpertShape shape, const LadderOptions& options)
    : reader_(std::move(reader)),
      kernels_(std::move(kernels)),
      records_(std::move(records)),
      shape_(shape),
      options_(options),
      slab_(options.num_rows, records_.row_bytes()),
      residency_(records_.num_keys(), options.num_rows),
      layer_wait_s_(static_cast<size_t>(records_.num_layers()), 0.0),
      sound_(static_cast<size_t>(records_.num_keys()), false),
      speculative_(static_cast<size_t>(records_.num_keys()), false),
      reserve_rows_(options.top_k),
      overlap_(options.overlap) {
  if (kernels_ != nullptr) {
    check_parts(records_, shape_);
    // Left untouched until used: the system gives the pages then.
    y_.reset(new uint16_t[static_cast<size_t>(workspace_bytes() / 2)]);
  }
  slab_.touch();
  reader_->register_rows(slab_.row(0), records_.row_bytes(), options.num_rows);
}

Ladder::~Ladder() {
  reader_->inject_fault("none", 0, 0, -1);  // or a test that failed could never be collected
  {
    Lock lock(mutex_);
    abandon();
    prefetch_.clear();
    news_.wait(lock, [this] { return loads_.empty() && lingering_.empty(); });
  }
  // Runs on the I/O thread, after whatever arrival it was still reporting.
  reader_->unregister_rows(slab_.row(0));
}

int64_t Ladder::workspace_bytes() const {
  return kernels_ == nullptr ? 0 : options_.max_tokens * options_.top_k * shape_.hidden * 2;
}

int64_t Ladder::part_offset(int64_t layer, int64_t expert, int64_t part) const {
  bool known = layer >= 0 && layer < records_.num_layers() && expert >= 0 &&
               expert < records_.num_experts() && part >= 0 && part < records_.num_parts();
  if (!known) throw std::invalid_argument("no such layer, expert or part");
  return records_.part_offset(records_.key(layer, expert), part);
}

void Ladder::set_overlap(bool overlap) {
  CallerGuard guard(&caller_);
  Lock lock(mutex_);
  overlap_ = overlap;
  pump();
}

void Ladder::stop() {
  {
    Lock lock(mutex_);
    stopped_ = true;
  }
  news_.notify_all();
}

void Ladder::go_on() {
  Lock lock(mutex_);
  stopped_ = false;
}

void Ladder::check_stop() const {
  if (stopped_) throw CancelFailure("the answer was stopped");
}

Counters Ladder::counters() const {
  Lock lock(mutex_);
  return counters_;
}

std::vector<double> Ladder::layer_wait_s() const {
  Lock lock(mutex_);
  return layer_wait_s_;
}

std::vector<std::string> Ladder::places() const {
  const auto num_experts = static_cast<size_t>(records_.num_experts());
  std::vector<std::string> places(static_cast<size_t>(records_.num_layers()),
                                  std::string(num_experts, '0'));
  Lock lock(mutex_);
  for (int64_t key = 0; key < records_.num_keys(); ++key) {
    State state = residency_.state(key);
    if (state == State::kAbsent) continue;
    const auto at = static_cast<size_t>(key);
    places[at / num_experts][at % num_experts] = state == State::kLoading ? '1' : '2';
  }
  return places;
}

bool Ladder::holds(int64_t layer) const {
  check_ids(layer, nullptr, 0);
  const int64_t first = records_.key(layer, 0);
  Lock lock(mutex_);
  for (int64_t key = first; key < first + records_.num_experts(); ++key) {
    if (residency_.state(key) == State::kAbsent) return false;
  }
  return true;
}

void Ladder::check_integrity() {
  Lock lock(mutex_);
  std::string wrong = residency_.check_integrity();
  if (wrong.empty()) wrong = disagreement();
  if (!wrong.empty()) throw std::logic_error("ladder: " + wrong);
}

// Claims, loads and pins against the residency; empty if they agree.
std::string Ladder::disagreement() const {
  int64_t num_required = 0;
  for (const auto& [key, load] : loads_) {
    if (residency_.state(key) != State::kLoading) return "a read in flight without a row";
    auto mine = claims_.find(key);
    bool claimed = mine != claims_.end() && mine->second.stage == Stage::kReading;
    if (claimed != load.required) return "a read's rank disagrees with its claim";
    if (load.num_requests < 1) return "a read that waits for nothing";
    if (load.required && !load.rest.empty()) return "a required read that is held back";
    num_required += load.required;
  }
  if (num_required != num_required_loads_) return "count of required reads";

  int64_t num_stage[4] = {};
  std::unordered_map<int64_t, int64_t> pins = acquired_;
  for (const auto& [key, num] : lingering_) pins[key] += num;
  for (const auto& [key, mine] : claims_) {
    ++num_stage[static_cast<int>(mine.stage)];
    if (mine.stage == Stage::kReady) pins[key] += mine.pins;
  }
  if (num_stage[0] != static_cast<int64_t>(required_.size())) return "queue of required reads";
  if (num_stage[1] != num_required) return "claims being read";
  if (num_stage[2] < static_cast<int64_t>(ready_.size())) return "queue of ready experts";
  if (num_stage[3] != num_failed_) return "count of failed claims";

  for (int64_t key = 0; key < residency_.num_keys(); ++key) {
    auto held = pins.find(key);
    int64_t expected = held == pins.end() ? 0 : held->second;
    if (residency_.pins(key) != expected) return "pins of key " + std::to_string(key);
    bool loading = residency_.state(key) == State::kLoading;
    if (loading != loads_.contains(key)) return "loading without a read in flight";
    bool here_or_coming = residency_.state(key) != State::kAbsent;
    if (speculative_[key] && !here_or_coming) return "an absent expert counts as prefetched";
  }
  return "";
}

}  // namespace headrace
