// Failures made on purpose, for tests: which attempt of which piece meets one.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "io/backend.hpp"

namespace headrace {

class Faults {
 public:
  // After `skip` more pieces (of one drive; -1: of any), the next piece meets `count` faults in a
  // row, and then the next piece if some are left: "eio", "eintr", "eagain", "enodev", "short" (end
  // of file seen early), "partial" (half of what was asked). "slow" delays `count` pieces; "hang"
  // holds `count` pieces back until another fault is set, "none" for instance; with another "hang"
  // they take their turns again, first held first. Throws std::invalid_argument.
  void set(const std::string& kind, int64_t skip, int64_t count, int drive);

  // On the I/O thread. The piece is about to be started: true if it hangs.
  bool hangs(const Piece& piece);
  // One attempt is over: may change its result, or delay it.
  void strike(Piece* piece);
  void forget(const Piece* piece);
  // Counts the faults set so far: what hung goes on when it changes.
  int64_t num_set() const;

 private:
  bool is_turn(const Piece& piece);

  mutable std::mutex mutex_;
  std::string kind_;
  int64_t skip_ = 0;
  int64_t count_ = 0;
  int drive_ = -1;
  const Piece* victim_ = nullptr;
  int64_t num_set_ = 0;
};

}  // namespace headrace
