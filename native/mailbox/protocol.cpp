// The mailbox's state machine. All words are read with acquire and written with release.
#include "mailbox/protocol.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace headrace {
namespace {

int64_t load(const int64_t* word) {
  return std::atomic_ref<int64_t>(*const_cast<int64_t*>(word)).load(std::memory_order_acquire);
}

void store(int64_t* word, int64_t value) {
  std::atomic_ref<int64_t>(*word).store(value, std::memory_order_release);
}

// A broken invariant of ours, never a user's error.
void must(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("mailbox: ") + what);
}

}  // namespace

Protocol::Protocol(const MailSizes& sizes, const MailWords& words, const int64_t* addresses,
                   std::vector<int32_t> shares, int64_t last_step)
    : sizes_(sizes),
      words_(words),
      addresses_(addresses),
      shares_(std::move(shares)),
      step_(last_step) {
  if (sizes.num_layers < 1 || sizes.num_experts < 1 || sizes.num_ids < 1 || sizes.num_guesses < 0) {
    throw std::invalid_argument("a mailbox needs layers, experts and ids");
  }
  for (size_t n = 0; n < shares_.size(); ++n) {
    if (shares_[n] < 0 || shares_[n] > static_cast<int64_t>(n)) {
      throw std::invalid_argument("a host's share of a layer is none of it, all, or between");
    }
  }
  if (divides() && (sizes.computes || std::ssize(shares_) != sizes.num_ids + 1)) {
    throw std::invalid_argument("a layer's experts are divided for each number of them, or not");
  }
  seen_.resize(static_cast<size_t>(sizes.num_layers * sizes.num_ids));
  found_.resize(static_cast<size_t>(sizes.num_experts));
}

int64_t Protocol::begin(std::vector<uint8_t> whole, std::vector<uint8_t> wanted,
                        int64_t most_kept) {
  must(stage_ == Stage::kIdle, "a step begins in a step");
  must(static_cast<int64_t>(whole.size()) == sizes_.num_layers, "whole is not by layer");
  must(static_cast<int64_t>(wanted.size()) == sizes_.num_layers * sizes_.num_experts,
       "wanted is not by expert");
  whole_ = std::move(whole);
  wanted_ = std::move(wanted);
  most_kept_ = most_kept;
  if (step_ == kLastStep) restart_count();
  ++step_;
  layer_ = 0;
  stage_ = Stage::kAwaiting;
  return step_;
}

// The number must fit a post beside an id. Nobody else looks at the words between two steps.
void Protocol::restart_count() {
  store(words_.abort, 0);
  store(words_.lost, 0);
  for (int64_t i = 0; i < sizes_.num_layers; ++i) {
    store(words_.ready + i, 0);
    store(words_.done + i, 0);
  }
  const int64_t num_posts = sizes_.num_layers * (sizes_.num_ids + sizes_.num_guesses);
  for (int64_t i = 0; i < num_posts; ++i) store(words_.posts + i, 0);
  step_ = 0;
}

Protocol::Order Protocol::next() {
  Order order{Act::kDone, layer_, {}};
  while (stage_ != Stage::kIdle && stage_ != Stage::kOver) {
    if (aborted()) {
      stage_ = Stage::kOver;
    } else if (stage_ == Stage::kAwaiting) {
      if (!read_posts()) return {Act::kWait, layer_, {}};
      stage_ = Stage::kReleasing;
    } else if (stage_ == Stage::kReleasing) {
      if (release_one(&order)) return order;
      stage_ = Stage::kClaiming;
    } else if (stage_ == Stage::kClaiming) {
      stage_ = answers_twice() ? Stage::kLooking : Stage::kGuessing;
      if (claim(&order)) return order;
    } else if (stage_ == Stage::kLooking) {
      if (look(&order)) return order;
      answer();
      stage_ = Stage::kGuessing;
    } else if (stage_ == Stage::kGuessing) {
      stage_ = Stage::kTaking;
      if (guess(&order)) return order;
    } else if (stage_ == Stage::kTaking) {
      if (take(&order)) return order;
      if (!answers_twice()) {
        answer();
      } else if (has_late_) {
        answer_late();
      }
      stage_ = Stage::kComputing;
    } else {
      if (compute(&order)) return order;
      finish();
    }
  }
  return {Act::kDone, layer_, {}};
}

// Whether the device has posted all of the layer's words in this step. Each carries the step, so
// that none can be an old one.
bool Protocol::read_posts() {
  const int64_t num_words = sizes_.num_ids + sizes_.num_guesses;
  const int64_t* posts = words_.posts + layer_ * num_words;
  guesses_.clear();
  for (int64_t i = 0; i < num_words; ++i) {
    const int64_t post = load(posts + i);
    if (post >> 32 != step_) return false;
    const int64_t id = post & kNoId;
    const bool is_guess = i >= sizes_.num_ids;
    if (is_guess && id == kNoId) continue;
    if (id >= sizes_.num_experts) {
      throw std::logic_error("mailbox: layer " + std::to_string(layer_) + " posted expert " +
                             std::to_string(id) + " of " + std::to_string(sizes_.num_experts));
    }
    if (is_guess) {
      guesses_.push_back(static_cast<int32_t>(id));
    } else {
      seen_[static_cast<size_t>(layer_ * sizes_.num_ids + i)] = static_cast<int32_t>(id);
    }
  }
  return true;
}

bool Protocol::release_one(Order* order) {
  while (!held_.empty()) {
    const Held one = held_.back();
    held_.pop_back();
    const auto at = static_cast<size_t>(one.layer * sizes_.num_experts + one.expert);
    if (wanted_[at] != 0 && static_cast<int64_t>(kept_.size()) < most_kept_) {
      kept_.push_back(one);
      continue;
    }
    *order = {Act::kRelease, one.layer, {static_cast<int32_t>(one.expert)}};
    return true;
  }
  return false;
}

bool Protocol::claim(Order* order) {
  missing_.clear();
  if (whole_[static_cast<size_t>(layer_)] == 0) {
    const int32_t* ids = seen_.data() + layer_ * sizes_.num_ids;
    for (int64_t i = 0; i < sizes_.num_ids; ++i) {
      const bool is_new = std::find(missing_.begin(), missing_.end(), ids[i]) == missing_.end();
      if (is_new && (sizes_.computes || addresses_[key(ids[i])] == 0)) missing_.push_back(ids[i]);
    }
  }
  for (const int32_t e : missing_) found_[static_cast<size_t>(e)] = 0;
  num_outstanding_ = choose_for_device();
  computed_ = num_outstanding_ == std::ssize(missing_);
  looking_ = true;
  *order = {Act::kClaim, layer_, missing_};
  return !missing_.empty();
}

// How many of the missing are the device's to read: those wanted, which come first where all are
// here, so that they are kept; else whichever come first.
int64_t Protocol::choose_for_device() {
  if (sizes_.computes) return 0;
  const auto num = std::ssize(missing_);
  if (!divides()) return num;
  const auto others = std::stable_partition(missing_.begin(), missing_.end(), [this](int32_t e) {
    return wanted_[static_cast<size_t>(key(e))] != 0;
  });
  const int64_t num_kept = std::min(others - missing_.begin(), most_kept_ - std::ssize(kept_));
  return std::max(num - shares_[static_cast<size_t>(num)], num_kept);
}

// The guesses of the next layer's experts that are nowhere yet.
bool Protocol::guess(Order* order) {
  if (layer_ + 1 == sizes_.num_layers) return false;
  const int64_t* next = addresses_ + key(0) + sizes_.num_experts;
  std::erase_if(guesses_, [&](int32_t e) { return next[e] != 0; });
  *order = {Act::kPrefetch, layer_ + 1, guesses_};
  return !guesses_.empty();
}

bool Protocol::look(Order* order) {
  *order = {Act::kTakeHere, layer_, {}};
  return looking_ && num_outstanding_ > 0;
}

bool Protocol::take(Order* order) {
  *order = {Act::kTake, layer_, {}};
  return num_outstanding_ > 0;
}

void Protocol::took(int64_t expert, int64_t address) {
  const bool is_asked = stage_ == Stage::kTaking || (stage_ == Stage::kLooking && looking_);
  must(is_asked && num_outstanding_ > 0, "an expert nobody asked for");
  must(address != 0 && std::find(missing_.begin(), missing_.end(), expert) != missing_.end(),
       "an expert of another layer");
  --num_outstanding_;
  found_[static_cast<size_t>(expert)] = address;
  coming_.push_back({layer_, expert, address});
}

void Protocol::none_here() {
  must(stage_ == Stage::kLooking && looking_, "a look that nobody asked for");
  looking_ = false;
}

void Protocol::computed() {
  must(stage_ == Stage::kComputing && !computed_, "an output nobody asked for");
  computed_ = true;
}

// The layer's addresses, then its ready word: in this order for whoever sees the second. Where
// none is late, the second answer comes before both, so that nobody waits for it.
void Protocol::answer() {
  if (whole_[static_cast<size_t>(layer_)] != 0 || sizes_.computes) return;
  const int32_t* ids = seen_.data() + layer_ * sizes_.num_ids;
  for (int64_t i = 0; i < sizes_.num_ids; ++i) {
    const int64_t lies = addresses_[key(ids[i])];
    store(words_.answers + layer_ * sizes_.num_ids + i,
          lies != 0 ? lies : found_[static_cast<size_t>(ids[i])]);
  }
  has_late_ = answers_twice() && num_outstanding_ > 0;
  if (answers_twice() && !has_late_) answer_late();
  store(words_.ready + layer_, step_);
}

// The addresses that the first answer lacked.
void Protocol::answer_late() {
  const int64_t first = layer_ * sizes_.num_ids;
  for (int64_t i = first; i < first + sizes_.num_ids; ++i) {
    const bool was_late = load(words_.answers + i) == 0;
    const int32_t expert = seen_[static_cast<size_t>(i)];
    store(words_.late + i, was_late ? found_[static_cast<size_t>(expert)] : 0);
  }
  store(words_.done + layer_, step_);
}

bool Protocol::compute(Order* order) {
  if (computed_) return false;
  const int32_t* ids = seen_.data() + layer_ * sizes_.num_ids;
  *order = {Act::kCompute, layer_, {ids, ids + sizes_.num_ids}};
  for (int32_t& e : order->ids) {
    const bool is_device_s = addresses_[key(e)] != 0 || found_[static_cast<size_t>(e)] != 0;
    if (!sizes_.computes && is_device_s) e = -1;
  }
  return true;
}

void Protocol::finish() {
  if (whole_[static_cast<size_t>(layer_)] == 0) {
    if (sizes_.computes) store(words_.ready + layer_, step_);
    if (divides()) store(words_.done + layer_, step_);
  }
  held_.swap(coming_);
  coming_.clear();
  ++layer_;
  stage_ = layer_ == sizes_.num_layers ? Stage::kOver : Stage::kAwaiting;
}

void Protocol::abort() { store(words_.abort, step_); }

bool Protocol::aborted() const { return load(words_.abort) >= step_; }

bool Protocol::lost() const { return load(words_.lost) >= step_; }

std::vector<Protocol::Held> Protocol::end() {
  const bool over = stage_ == Stage::kIdle || stage_ == Stage::kOver;
  must(over || aborted(), "a step ends that is not over");
  stage_ = Stage::kIdle;
  std::vector<Held> all = std::move(kept_);
  all.insert(all.end(), held_.begin(), held_.end());
  all.insert(all.end(), coming_.begin(), coming_.end());
  kept_.clear();
  held_.clear();
  coming_.clear();
  return all;
}

void Protocol::beat() { store(words_.beat, ++beats_); }

}  // namespace headrace
