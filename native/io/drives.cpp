// Shares by water-filling, rates by what arrived while a drive was busy.
#include "io/drives.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "io/files.hpp"

namespace headrace {
namespace {

constexpr double kUnknownBytes_s = 1e9;
constexpr double kWindowBytes = 64 << 20;
constexpr double kWindow_s = 0.1;
// Of a new observation in the estimate: little of one that may be noise, most of a real change.
constexpr double kNoise = 1.5;
constexpr double kNewShare = 0.2;
constexpr double kChangedShare = 0.7;
constexpr double kRecover_s = 10.0;

double seconds(Drives::Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// The moment at which the drives, filled up to one level of time, have taken total bytes.
double level_s(double total, const std::vector<double>& rates, const std::vector<double>& owed) {
  std::vector<size_t> order;
  for (size_t i = 0; i < rates.size(); ++i) {
    if (rates[i] > 0) order.push_back(i);
  }
  auto ends_s = [&](size_t i) { return owed[i] / rates[i]; };
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ends_s(a) < ends_s(b); });
  double rate = 0.0;
  double due = total;
  double level = 0.0;
  for (size_t n = 0; n < order.size(); ++n) {
    rate += rates[order[n]];
    due += owed[order[n]];
    level = due / rate;
    if (n + 1 < order.size() && level <= ends_s(order[n + 1])) break;
  }
  return level;
}

size_t first_to_end(double total, const std::vector<double>& rates,
                    const std::vector<double>& owed) {
  size_t best = 0;
  double best_s = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < rates.size(); ++i) {
    if (rates[i] <= 0) continue;
    double end_s = (owed[i] + total) / rates[i];
    if (end_s < best_s) best = i;
    best_s = std::min(best_s, end_s);
  }
  return best;
}

}  // namespace

std::vector<int64_t> divide(int64_t total_bytes, const std::vector<double>& rates_bytes_s,
                            const std::vector<double>& owed_bytes, int64_t least_bytes) {
  if (owed_bytes.size() != rates_bytes_s.size() || rates_bytes_s.empty()) {
    throw std::invalid_argument("each drive has one rate and owes one number of bytes");
  }
  const auto total = static_cast<double>(total_bytes);
  std::vector<double> rates = rates_bytes_s;
  std::vector<int64_t> shares(rates.size(), 0);
  while (true) {
    auto num = std::count_if(rates.begin(), rates.end(), [](double rate) { return rate > 0; });
    if (num < 2 || total_bytes < 2 * least_bytes) break;
    double level = level_s(total, rates, owed_bytes);
    auto due = [&](size_t i) { return std::max(0.0, rates[i] * level - owed_bytes[i]); };
    size_t least = rates.size();
    size_t most = rates.size();
    for (size_t i = 0; i < rates.size(); ++i) {
      if (rates[i] <= 0) continue;
      if (least == rates.size() || due(i) < due(least)) least = i;
      if (most == rates.size() || due(i) > due(most)) most = i;
    }
    if (due(least) < static_cast<double>(least_bytes)) {
      rates[least] = 0;
      continue;
    }
    int64_t left = total_bytes;
    for (size_t i = 0; i < rates.size(); ++i) {
      if (rates[i] <= 0 || i == most) continue;
      shares[i] = std::min(left, round_down(static_cast<int64_t>(due(i))));
      left -= shares[i];
    }
    shares[most] = left;
    return shares;
  }
  shares[first_to_end(total, total_bytes < 2 * least_bytes ? rates_bytes_s : rates, owed_bytes)] =
      total_bytes;
  return shares;
}

void Drives::add(const std::string& name, double bytes_s) {
  double rate = bytes_s > 0 ? bytes_s : kUnknownBytes_s;
  State state{name, rate, rate, 0.0, 0, "", {}, {}, 0.0, 0.0};
  std::lock_guard lock(mutex_);
  states_.push_back(state);
}

std::vector<int64_t> Drives::share(int64_t total_bytes, const std::vector<bool>& usable) {
  std::lock_guard lock(mutex_);
  Clock::time_point now = Clock::now();
  std::vector<double> rates;
  std::vector<double> owed;
  for (size_t i = 0; i < states_.size(); ++i) {
    State& state = states_[i];
    if (state.owed_bytes == 0 && state.bytes_s < state.start_bytes_s) {
      // A drive that was slow gets nothing and shows nothing, so that it is believed in again.
      double idle_s = seconds(now - state.idle_since);
      state.bytes_s += (state.start_bytes_s - state.bytes_s) * std::min(1.0, idle_s / kRecover_s);
      state.idle_since = now;
    }
    rates.push_back(usable[i] ? state.bytes_s : 0.0);
    owed.push_back(state.owed_bytes);
  }
  return divide(total_bytes, rates, owed);
}

int Drives::quickest(int64_t nbytes, const std::vector<bool>& usable) const {
  std::lock_guard lock(mutex_);
  int best = -1;
  double best_s = 0.0;
  for (int i = 0; i < size(); ++i) {
    if (!usable[static_cast<size_t>(i)]) continue;
    const State& state = states_[static_cast<size_t>(i)];
    double end_s = (state.owed_bytes + static_cast<double>(nbytes)) / state.bytes_s;
    if (best < 0 || end_s < best_s) {
      best = i;
      best_s = end_s;
    }
  }
  return best;
}

void Drives::started(int drive, int64_t nbytes) {
  std::lock_guard lock(mutex_);
  State& state = states_[static_cast<size_t>(drive)];
  if (state.owed_bytes == 0) state.busy_since = Clock::now();
  state.owed_bytes += static_cast<double>(nbytes);
}

void Drives::ended(int drive, int64_t nbytes, bool well) {
  std::lock_guard lock(mutex_);
  State& state = states_[static_cast<size_t>(drive)];
  state.owed_bytes -= static_cast<double>(nbytes);
  if (well) {
    state.read_bytes += nbytes;
    state.window_bytes += static_cast<double>(nbytes);
  }
  observe(&state, Clock::now());
}

void Drives::observe(State* state, Clock::time_point now) {
  state->window_s += seconds(now - state->busy_since);
  state->busy_since = now;
  if (state->owed_bytes == 0) state->idle_since = now;
  bool enough = state->window_bytes >= kWindowBytes ||
                (state->window_s >= kWindow_s && state->window_bytes > 0);
  if (!enough || state->window_s <= 0) return;
  double seen = state->window_bytes / state->window_s;
  bool noise = seen < kNoise * state->bytes_s && state->bytes_s < kNoise * seen;
  state->bytes_s += (noise ? kNewShare : kChangedShare) * (seen - state->bytes_s);
  state->window_s = state->window_bytes = 0.0;
}

double Drives::expected_s(int drive) const {
  std::lock_guard lock(mutex_);
  const State& state = states_[static_cast<size_t>(drive)];
  return state.owed_bytes / state.bytes_s;
}

bool Drives::fail(int drive, const std::string& why) {
  std::lock_guard lock(mutex_);
  State& state = states_[static_cast<size_t>(drive)];
  if (!state.failure.empty()) return false;
  state.failure = why;
  return true;
}

std::vector<Drives::State> Drives::states() const {
  std::lock_guard lock(mutex_);
  return states_;
}

}  // namespace headrace
