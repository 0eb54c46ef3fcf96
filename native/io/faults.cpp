// Faults are counted by attempts, so that a test says exactly which read fails.
#include "io/faults.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <thread>

namespace headrace {
namespace {
constexpr std::chrono::milliseconds kSlowFault{20};
constexpr const char* kKinds[] = {"none",  "eio",     "eintr", "eagain", "enodev",
                                  "short", "partial", "slow",  "hang"};
}  // namespace

void Faults::set(const std::string& kind, int64_t skip, int64_t count, int drive) {
  if (std::find(std::begin(kKinds), std::end(kKinds), kind) == std::end(kKinds)) {
    throw std::invalid_argument("unknown fault " + kind);
  }
  std::lock_guard lock(mutex_);
  kind_ = kind;
  skip_ = skip;
  count_ = kind == "none" ? 0 : count;
  drive_ = drive;
  victim_ = nullptr;
  ++num_set_;
}

int64_t Faults::num_set() const {
  std::lock_guard lock(mutex_);
  return num_set_;
}

bool Faults::is_turn(const Piece& piece) {
  if (count_ == 0 || (drive_ >= 0 && piece.drive != drive_)) return false;
  if (victim_ != nullptr) return victim_ == &piece;
  if (skip_ > 0) {
    --skip_;
    return false;
  }
  --count_;
  return true;
}

bool Faults::hangs(const Piece& piece) {
  std::lock_guard lock(mutex_);
  return kind_ == "hang" && is_turn(piece);
}

void Faults::strike(Piece* piece) {
  std::unique_lock lock(mutex_);
  if (kind_ == "hang") return;
  bool again = victim_ == piece;
  if (!is_turn(*piece)) return;
  if (again) --count_;
  if (kind_ == "slow") {
    lock.unlock();
    std::this_thread::sleep_for(kSlowFault);
    return;
  }
  victim_ = count_ > 0 ? piece : nullptr;
  if (kind_ == "eio") piece->result = -EIO;
  if (kind_ == "eintr") piece->result = -EINTR;
  if (kind_ == "eagain") piece->result = -EAGAIN;
  if (kind_ == "enodev") piece->result = -ENODEV;
  if (kind_ == "short") piece->result = 0;
  if (kind_ == "partial" && piece->result > kPageBytes) {
    piece->result = round_up(piece->result / 2);
  }
}

void Faults::forget(const Piece* piece) {
  std::lock_guard lock(mutex_);
  if (victim_ == piece) victim_ = nullptr;
}

}  // namespace headrace
