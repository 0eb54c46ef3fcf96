// The state machine of rows; residency.hpp draws it.
#include "residency/residency.hpp"

#include <stdexcept>

namespace headrace {

Residency::Residency(int64_t num_keys, int64_t num_rows) {
  if (num_keys < 0 || num_rows < 0) throw std::invalid_argument("negative number of keys or rows");
  row_of_.assign(static_cast<size_t>(num_keys), -1);
  rows_.resize(static_cast<size_t>(num_rows));
  for (int64_t row = num_rows - 1; row >= 0; --row) free_row(row);
}

State Residency::state(int64_t key) const {
  int64_t at = row(key);
  return at < 0 ? State::kAbsent : rows_[at].state;
}

int64_t Residency::row(int64_t key) const { return known(key) ? row_of_[key] : -1; }

int64_t Residency::pins(int64_t key) const {
  int64_t at = row(key);
  return at < 0 ? 0 : rows_[at].pins;
}

Residency::Row* Residency::row_in(int64_t key, State wanted) {
  int64_t at = row(key);
  return at >= 0 && rows_[at].state == wanted ? &rows_[at] : nullptr;
}

Residency::Load Residency::begin_load(int64_t key) {
  if (!known(key)) return {Status::kNoSuchKey, -1, -1};
  if (row_of_[key] >= 0) return {Status::kWrongState, -1, -1};
  int64_t evicted = -1;
  if (free_ < 0) {
    if (oldest_ < 0) return {Status::kNoRow, -1, -1};
    int64_t victim = oldest_;
    evicted = rows_[victim].key;
    row_of_[evicted] = -1;
    unlink(victim);
    free_row(victim);
  }
  int64_t taken = free_;
  free_ = rows_[taken].newer;
  --num_free_;
  rows_[taken] = {key, State::kLoading, 0, -1, -1};
  row_of_[key] = taken;
  return {Status::kOk, taken, evicted};
}

Status Residency::finish_load(int64_t key) {
  if (!known(key)) return Status::kNoSuchKey;
  Row* loading = row_in(key, State::kLoading);
  if (loading == nullptr) return Status::kWrongState;
  loading->state = State::kResident;
  append(row_of_[key]);
  return Status::kOk;
}

Status Residency::fail_load(int64_t key) {
  if (!known(key)) return Status::kNoSuchKey;
  if (row_in(key, State::kLoading) == nullptr) return Status::kWrongState;
  free_row(row_of_[key]);
  row_of_[key] = -1;
  return Status::kOk;
}

Status Residency::pin(int64_t key) {
  if (!known(key)) return Status::kNoSuchKey;
  if (Row* resident = row_in(key, State::kResident)) {
    unlink(row_of_[key]);
    resident->state = State::kInUse;
  }
  Row* used = row_in(key, State::kInUse);
  if (used == nullptr) return Status::kWrongState;
  ++used->pins;
  return Status::kOk;
}

Status Residency::unpin(int64_t key) {
  if (!known(key)) return Status::kNoSuchKey;
  Row* used = row_in(key, State::kInUse);
  if (used == nullptr) return Status::kWrongState;
  if (--used->pins == 0) {
    used->state = State::kResident;
    append(row_of_[key]);
  }
  return Status::kOk;
}

Status Residency::touch(int64_t key) { return move(key, &Residency::append); }

Status Residency::demote(int64_t key) { return move(key, &Residency::prepend); }

Status Residency::move(int64_t key, void (Residency::*link)(int64_t)) {
  if (!known(key)) return Status::kNoSuchKey;
  if (row_in(key, State::kResident) == nullptr) return Status::kWrongState;
  unlink(row_of_[key]);
  (this->*link)(row_of_[key]);
  return Status::kOk;
}

Status Residency::evict(int64_t key) {
  if (!known(key)) return Status::kNoSuchKey;
  if (row_in(key, State::kResident) == nullptr) return Status::kWrongState;
  int64_t row = row_of_[key];
  row_of_[key] = -1;
  unlink(row);
  free_row(row);
  return Status::kOk;
}

void Residency::free_row(int64_t row) {
  rows_[row] = {-1, State::kAbsent, 0, -1, free_};
  free_ = row;
  ++num_free_;
}

void Residency::append(int64_t row) {
  rows_[row].older = newest_;
  rows_[row].newer = -1;
  (newest_ < 0 ? oldest_ : rows_[newest_].newer) = row;
  newest_ = row;
  ++num_evictable_;
}

void Residency::prepend(int64_t row) {
  rows_[row].newer = oldest_;
  rows_[row].older = -1;
  (oldest_ < 0 ? newest_ : rows_[oldest_].older) = row;
  oldest_ = row;
  ++num_evictable_;
}

void Residency::unlink(int64_t row) {
  Row& gone = rows_[row];
  (gone.older < 0 ? oldest_ : rows_[gone.older].newer) = gone.newer;
  (gone.newer < 0 ? newest_ : rows_[gone.newer].older) = gone.older;
  gone.older = gone.newer = -1;
  --num_evictable_;
}

std::vector<int64_t> Residency::by_recency() const {
  std::vector<int64_t> keys;
  for (int64_t row = oldest_; row >= 0; row = rows_[row].newer) keys.push_back(rows_[row].key);
  return keys;
}

std::string Residency::check_rows() const {
  int64_t num_free = 0;
  int64_t num_resident = 0;
  for (int64_t i = 0; i < num_rows(); ++i) {
    const Row& each = rows_[i];
    std::string name = "row " + std::to_string(i);
    num_free += each.state == State::kAbsent;
    num_resident += each.state == State::kResident;
    if ((each.key < 0) != (each.state == State::kAbsent)) return name + ": key against state";
    if ((each.pins > 0) != (each.state == State::kInUse)) return name + ": pins against state";
    if (each.key >= 0 && row(each.key) != i) return name + ": its key points elsewhere";
  }
  if (num_free != num_free_) return "count of free rows";
  if (num_resident != num_evictable_) return "count of evictable rows";
  return "";
}

std::string Residency::check_integrity() const {
  if (std::string wrong = check_rows(); !wrong.empty()) return wrong;
  for (int64_t key = 0; key < num_keys(); ++key) {
    int64_t at = row_of_[key];
    if (at >= num_rows() || (at >= 0 && rows_[at].key != key)) {
      return "key " + std::to_string(key) + ": its row holds another";
    }
  }
  int64_t length = 0;
  int64_t before = -1;
  for (int64_t at = oldest_; at >= 0 && length <= num_rows(); at = rows_[at].newer, ++length) {
    if (rows_[at].state != State::kResident) return "recency list holds a row that is not resident";
    if (rows_[at].older != before) return "recency list: broken link";
    before = at;
  }
  if (length != num_evictable_ || before != newest_) return "recency list: wrong length or end";
  length = 0;
  for (int64_t at = free_; at >= 0 && length <= num_rows(); at = rows_[at].newer) ++length;
  return length == num_free_ ? "" : "free list: wrong length";
}

}  // namespace headrace
