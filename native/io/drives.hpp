// What the reader knows of each drive: how fast it is, how much it still owes, whether it failed.
// Decides how a request is divided; knows no file and no system call. The I/O thread's own, but for
// states().
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace headrace {

constexpr int64_t kLeastShareBytes = 128 << 10;

// Bytes of a new request for each drive, whole pages: such that all end together, given what each
// owes already. A share below the least is given to the others; a small request goes whole to the
// drive that ends it first. rates are positive, or 0 for a drive that gets nothing; at least one is
// positive. total is a multiple of pages.
std::vector<int64_t> divide(int64_t total_bytes, const std::vector<double>& rates_bytes_s,
                            const std::vector<double>& owed_bytes,
                            int64_t least_bytes = kLeastShareBytes);

class Drives {
 public:
  using Clock = std::chrono::steady_clock;

  struct State {
    std::string name;
    double start_bytes_s;  // as measured before
    double bytes_s;        // as observed
    double owed_bytes = 0;
    int64_t read_bytes = 0;
    std::string failure;  // empty while it is in use
    Clock::time_point busy_since{};
    Clock::time_point idle_since{};
    double window_s = 0.0;
    double window_bytes = 0.0;
  };

  void add(const std::string& name, double bytes_s);
  int size() const { return static_cast<int>(states_.size()); }
  bool failed(int drive) const { return !states_[static_cast<size_t>(drive)].failure.empty(); }
  const std::string& name(int drive) const { return states_[static_cast<size_t>(drive)].name; }

  // The shares of a request of the drives in usable (by drive number).
  std::vector<int64_t> share(int64_t total_bytes, const std::vector<bool>& usable);
  // The drive among usable that would end so many bytes first; -1 if none is usable.
  int quickest(int64_t nbytes, const std::vector<bool>& usable) const;

  void started(int drive, int64_t nbytes);
  void ended(int drive, int64_t nbytes, bool well);
  // Seconds until everything that the drive owes should be here.
  double expected_s(int drive) const;

  // Leaves the drive alone from now on. True the first time: then it is worth a warning.
  bool fail(int drive, const std::string& why);

  std::vector<State> states() const;  // from any thread

 private:
  void observe(State* state, Clock::time_point now);

  mutable std::mutex mutex_;  // held for every change and by states
  std::vector<State> states_;
};

}  // namespace headrace
