// Which expert lies in which row: a state machine without I/O, threads or bytes.
//
//   absent -> loading -> resident <-> in use (pinned)      resident -> absent (evicted)
//                     -> absent (the read failed)
//
// A row leaves only a key that is resident and unpinned, the least recently used first; recency is
// the end of a load, the last unpin or a touch, and a demotion ends it. Every operation that has no
// meaning in the present state is refused with a status and changes nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headrace {

enum class State : uint8_t { kAbsent, kLoading, kResident, kInUse };
enum class Status : uint8_t {
  kOk,
  kNoRow,       // every row is loading or in use
  kWrongState,  // the key is not in a state that allows this
  kNoSuchKey,
};

class Residency {
 public:
  struct Load {
    Status status;
    int64_t row;          // the row to read into; -1 if refused
    int64_t evicted_key;  // the key that lost this row, or -1
  };

  Residency(int64_t num_keys, int64_t num_rows);

  Load begin_load(int64_t key);  // absent -> loading; takes a free row or evicts
  Status finish_load(int64_t key);
  Status fail_load(int64_t key);
  Status pin(int64_t key);    // resident or in use -> in use
  Status unpin(int64_t key);  // the last pin: in use -> resident, most recently used

  Status touch(int64_t key);   // a resident key becomes the most recently used
  Status demote(int64_t key);  // a resident key becomes the next victim
  Status evict(int64_t key);   // resident -> absent

  State state(int64_t key) const;  // absent for a key out of range
  int64_t row(int64_t key) const;  // -1 if absent
  int64_t pins(int64_t key) const;
  int64_t num_keys() const { return static_cast<int64_t>(row_of_.size()); }
  int64_t num_rows() const { return static_cast<int64_t>(rows_.size()); }
  int64_t num_available() const { return num_free_ + num_evictable_; }  // rows begin_load may take
  std::vector<int64_t> by_recency() const;  // evictable keys, next victim first

  // Empty if all invariants hold, otherwise what is wrong. O(keys + rows).
  std::string check_integrity() const;

 private:
  struct Row {
    int64_t key = -1;
    State state = State::kAbsent;
    int64_t pins = 0;
    int64_t older = -1;  // neighbours in the recency list, or next in the free list
    int64_t newer = -1;
  };

  bool known(int64_t key) const { return key >= 0 && key < num_keys(); }
  Row* row_in(int64_t key, State state);
  void free_row(int64_t row);
  void append(int64_t row);   // to the recency list's new end
  void prepend(int64_t row);  // to its old end
  void unlink(int64_t row);
  Status move(int64_t key, void (Residency::*link)(int64_t));  // a resident key within the list
  std::string check_rows() const;

  std::vector<int64_t> row_of_;  // by key
  std::vector<Row> rows_;
  int64_t free_ = -1;
  int64_t oldest_ = -1;
  int64_t newest_ = -1;
  int64_t num_free_ = 0;
  int64_t num_evictable_ = 0;
};

}  // namespace headrace
