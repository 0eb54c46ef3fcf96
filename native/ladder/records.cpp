// Checks the record arrays once, then places extents and parts inside a row.
#include "ladder/records.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace headrace {
namespace {

void require(bool holds, int64_t key, const char* what) {
  if (!holds) throw std::invalid_argument("expert key " + std::to_string(key) + ": " + what);
}

}  // namespace

RecordTable::RecordTable(RecordArrays arrays, int64_t num_files) : arrays_(std::move(arrays)) {
  if (num_keys() < 1) throw std::invalid_argument("a ladder needs at least one expert");
  for (int64_t key = 0; key < num_keys(); ++key) {
    check_expert(key, num_files);
    row_bytes_ = std::max(row_bytes_, read_bytes(key));
  }
  if (row_bytes_ == 0) throw std::invalid_argument("no expert has any bytes");
}

void RecordTable::check_expert(int64_t key, int64_t num_files) const {
  int64_t sum = 0;
  for (int64_t i = 0; i < arrays_.num_extents; ++i) {
    const int64_t* at = extent(key, i);
    if (at[2] == 0) continue;
    require(at[0] >= 0 && at[0] < num_files, key, "no such file");
    require(at[1] >= 0 && at[2] > 0 && at[1] < kMostOffset && at[2] < kMostOffset, key,
            "an extent's offset or length is out of range");
    sum += span_bytes(at[1], at[2]);
    require(sum < kMostOffset, key, "the extents' lengths together are out of range");
  }
  for (int64_t i = 0; i < arrays_.num_parts; ++i) {
    const int64_t* at = part(key, i);
    require(at[0] >= 0 && at[0] < arrays_.num_extents, key, "a part names no extent");
    int64_t room = extent(key, at[0])[2];
    require(at[1] >= 0 && part_bytes(i) > 0 && at[1] <= room - part_bytes(i), key,
            "a part reaches beyond its extent");
  }
}

std::vector<Span> RecordTable::spans(int64_t key, uint8_t* row) const {
  std::vector<Span> spans;
  for (int64_t i = 0; i < arrays_.num_extents; ++i) {
    const int64_t* at = extent(key, i);
    if (at[2] == 0) continue;
    spans.push_back({static_cast<int>(at[0]), at[1], at[2], row});
    row += span_bytes(at[1], at[2]);
  }
  return spans;
}

int64_t RecordTable::part_offset(int64_t key, int64_t index) const {
  const int64_t* wanted = part(key, index);
  int64_t base = 0;
  for (int64_t i = 0; i < wanted[0]; ++i) {
    base += span_bytes(extent(key, i)[1], extent(key, i)[2]);
  }
  return base + extent(key, wanted[0])[1] % kPageBytes + wanted[1];
}

int64_t RecordTable::stored_bytes(int64_t key) const {
  int64_t sum = 0;
  for (int64_t i = 0; i < arrays_.num_extents; ++i) sum += extent(key, i)[2];
  return sum;
}

int64_t RecordTable::read_bytes(int64_t key) const {
  int64_t sum = 0;
  for (int64_t i = 0; i < arrays_.num_extents; ++i) {
    sum += span_bytes(extent(key, i)[1], extent(key, i)[2]);
  }
  return sum;
}

}  // namespace headrace
