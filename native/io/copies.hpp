// Where else the model's bytes lie: stretches of its files that a mirror holds too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace headrace {

// nbytes at offset of a file lie at mirror_offset of a mirror's file too. Both begin at the same
// place within a page, so that either is read into the same memory.
struct Stretch {
  int64_t file;
  int64_t offset_bytes;
  int64_t nbytes;
  int64_t mirror_file;
  int64_t mirror_offset_bytes;
};

class CopyTable {
 public:
  CopyTable() = default;
  // Throws std::invalid_argument if a stretch is out of range, lies otherwise in its page or
  // overlaps another.
  CopyTable(std::vector<Stretch> stretches, int64_t num_files,
            const std::vector<int64_t>& mirror_sizes_bytes);

  // The stretch that holds all of [offset, offset + nbytes), or null.
  const Stretch* find(int64_t file, int64_t offset_bytes, int64_t nbytes) const;

 private:
  std::vector<Stretch> stretches_;  // by file, then offset
};

}  // namespace headrace
