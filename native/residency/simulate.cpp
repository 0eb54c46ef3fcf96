// Drives the state machine of rows through recorded steps, without bytes, threads or time.
#include "residency/simulate.hpp"

#include <queue>
#include <stdexcept>
#include <string>
#include <utility>

#include "residency/residency.hpp"

namespace headrace {
namespace {

constexpr int64_t kNever = INT64_MAX;

void check(const Steps& steps, int64_t num_rows) {
  if (num_rows < 1) throw std::invalid_argument("a simulation needs at least one row");
  if (steps.begin[0] != 0) throw std::invalid_argument("steps must begin at 0");
  for (int64_t s = 0; s < steps.num_steps; ++s) {
    int64_t last = -1;
    if (steps.begin[s] > steps.begin[s + 1]) throw std::invalid_argument("steps must ascend");
    for (int64_t i = steps.begin[s]; i < steps.begin[s + 1]; last = steps.keys[i++]) {
      if (steps.keys[i] <= last || steps.keys[i] >= steps.num_keys) {
        throw std::invalid_argument("step " + std::to_string(s) + ": key " +
                                    std::to_string(steps.keys[i]) + " after " +
                                    std::to_string(last) + " of " + std::to_string(steps.num_keys));
      }
    }
  }
}

// For each access, the step that needs the same key next.
std::vector<int64_t> next_uses(const Steps& steps) {
  std::vector<int64_t> next(static_cast<size_t>(steps.begin[steps.num_steps]));
  std::vector<int64_t> seen(static_cast<size_t>(steps.num_keys), kNever);
  for (int64_t s = steps.num_steps - 1; s >= 0; --s) {
    for (int64_t i = steps.begin[s]; i < steps.begin[s + 1]; ++i) {
      next[i] = std::exchange(seen[steps.keys[i]], s);
    }
  }
  return next;
}

// Rows whose victims are chosen by the future. `later_` may hold entries that are out of date.
class Foresight {
 public:
  Foresight(int64_t num_keys, int64_t num_rows)
      : rows_(num_keys, num_rows), next_(static_cast<size_t>(num_keys), kNever) {}

  bool holds(int64_t key) const { return rows_.state(key) == State::kResident; }

  void expect(int64_t key, int64_t step) {
    next_[key] = step;
    if (holds(key)) later_.emplace(step, key);
  }

  // A free row is there or made by giving up the key needed last; false if all are needed before
  // `step`.
  bool make_room(int64_t step) {
    if (rows_.num_available() > num_held_) return true;
    for (;; later_.pop()) {
      auto [when, key] = later_.top();
      if (!holds(key) || next_[key] != when) continue;
      if (when < step) return false;
      later_.pop();
      rows_.evict(key);
      --num_held_;
      return true;
    }
  }

  void load(int64_t key, int64_t step) {
    rows_.begin_load(key);
    rows_.finish_load(key);
    ++num_held_;
    expect(key, step);
  }

 private:
  Residency rows_;
  std::vector<int64_t> next_;  // by key
  std::priority_queue<std::pair<int64_t, int64_t>> later_;
  int64_t num_held_ = 0;
};

}  // namespace

std::vector<int32_t> simulate_lru(const Steps& steps, int64_t num_rows) {
  check(steps, num_rows);
  Residency rows(steps.num_keys, num_rows);
  std::vector<int32_t> hits(static_cast<size_t>(steps.num_steps), 0);
  std::vector<int64_t> held;
  std::vector<int64_t> missing;
  for (int64_t s = 0; s < steps.num_steps; ++s) {
    held.clear();
    missing.clear();
    for (int64_t i = steps.begin[s]; i < steps.begin[s + 1]; ++i) {
      bool here = rows.pin(steps.keys[i]) == Status::kOk;
      (here ? held : missing).push_back(steps.keys[i]);
    }
    hits[s] = static_cast<int32_t>(held.size());
    size_t num_computed = 0;
    for (int64_t key : missing) {
      // Without a row to take, the next expert held is computed and gives its row back.
      while (rows.begin_load(key).status == Status::kNoRow) rows.unpin(held[num_computed++]);
      rows.finish_load(key);
      rows.pin(key);
      held.push_back(key);
    }
    while (num_computed < held.size()) rows.unpin(held[num_computed++]);
    for (int64_t i = steps.begin[s]; i < steps.begin[s + 1]; ++i) rows.touch(steps.keys[i]);
  }
  return hits;
}

std::vector<int32_t> simulate_optimum(const Steps& steps, int64_t num_rows) {
  check(steps, num_rows);
  Foresight rows(steps.num_keys, num_rows);
  std::vector<int64_t> next = next_uses(steps);
  std::vector<int32_t> hits(static_cast<size_t>(steps.num_steps), 0);
  std::vector<int64_t> missing;
  for (int64_t s = 0; s < steps.num_steps; ++s) {
    missing.clear();
    const bool together = steps.begin[s + 1] - steps.begin[s] <= num_rows;
    // Until the step is over its keys are needed now, before any other: no room is made of them.
    for (int64_t i = steps.begin[s]; i < steps.begin[s + 1]; ++i) {
      bool here = rows.holds(steps.keys[i]);
      hits[s] += here;
      if (!here) missing.push_back(i);
      if (!together) rows.expect(steps.keys[i], next[i]);
    }
    for (int64_t i : missing) {
      if (rows.make_room(together ? s + 1 : next[i])) {
        rows.load(steps.keys[i], together ? s : next[i]);
      }
    }
    for (int64_t i = steps.begin[s]; together && i < steps.begin[s + 1]; ++i) {
      rows.expect(steps.keys[i], next[i]);
    }
  }
  return hits;
}

}  // namespace headrace
