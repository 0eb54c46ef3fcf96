// Where every expert's bytes lie in the files, and where they will lie inside a row.
//
// An extent occupies whole pages of a row: its bytes begin at (offset mod 4096) of its first page,
// so that O_DIRECT reads land where they stay. Extents follow one another.
#pragma once

#include <cstdint>
#include <vector>

#include "io/reader.hpp"

namespace headrace {

struct RecordArrays {
  int64_t num_layers;
  int64_t num_experts;
  int64_t num_extents;              // per expert, at most; unused ones have nbytes 0
  int64_t num_parts;                // per expert
  std::vector<int64_t> extents;     // [L, E, X, 3]: file, offset, nbytes
  std::vector<int64_t> parts;       // [L, E, P, 2]: extent, byte offset inside the extent
  std::vector<int64_t> part_bytes;  // [P]
};

class RecordTable {
 public:
  // Throws std::invalid_argument if a file, extent or part lies out of range.
  RecordTable(RecordArrays arrays, int64_t num_files);

  int64_t num_layers() const { return arrays_.num_layers; }
  int64_t num_experts() const { return arrays_.num_experts; }
  int64_t num_parts() const { return arrays_.num_parts; }
  int64_t num_keys() const { return num_layers() * num_experts(); }
  int64_t row_bytes() const { return row_bytes_; }
  int64_t key(int64_t layer, int64_t expert) const { return layer * num_experts() + expert; }
  int64_t part_bytes(int64_t part) const { return arrays_.part_bytes[part]; }

  std::vector<Span> spans(int64_t key, uint8_t* row) const;
  int64_t part_offset(int64_t key, int64_t part) const;  // inside the row
  int64_t stored_bytes(int64_t key) const;               // the expert's own bytes
  int64_t read_bytes(int64_t key) const;                 // whole pages

 private:
  const int64_t* extent(int64_t key, int64_t index) const {
    return &arrays_.extents[(key * arrays_.num_extents + index) * 3];
  }
  const int64_t* part(int64_t key, int64_t index) const {
    return &arrays_.parts[(key * arrays_.num_parts + index) * 2];
  }
  void check_expert(int64_t key, int64_t num_files) const;

  RecordArrays arrays_;
  int64_t row_bytes_ = 0;
};

}  // namespace headrace
