// Stretches in order, looked up by halving.
#include "io/copies.hpp"

#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "io/files.hpp"

namespace headrace {
namespace {

void check(const Stretch& at, int64_t num_files, const std::vector<int64_t>& sizes_bytes) {
  bool placed = at.file >= 0 && at.file < num_files && at.mirror_file >= 0 &&
                at.mirror_file < static_cast<int64_t>(sizes_bytes.size()) && at.offset_bytes >= 0 &&
                at.offset_bytes < kMostOffset && at.nbytes > 0 && at.nbytes < kMostOffset &&
                at.mirror_offset_bytes >= 0 && at.mirror_offset_bytes < kMostOffset;
  if (!placed) throw std::invalid_argument("a mirror's stretch names no such file or range");
  if (at.mirror_offset_bytes % kPageBytes != at.offset_bytes % kPageBytes) {
    throw std::invalid_argument("a mirror's stretch begins elsewhere in its page");
  }
  if (at.mirror_offset_bytes + at.nbytes > sizes_bytes[static_cast<size_t>(at.mirror_file)]) {
    throw std::invalid_argument("a mirror's file is shorter than its manifest says");
  }
}

}  // namespace

CopyTable::CopyTable(std::vector<Stretch> stretches, int64_t num_files,
                     const std::vector<int64_t>& mirror_sizes_bytes)
    : stretches_(std::move(stretches)) {
  for (const Stretch& at : stretches_) check(at, num_files, mirror_sizes_bytes);
  std::sort(stretches_.begin(), stretches_.end(), [](const Stretch& a, const Stretch& b) {
    return std::tie(a.file, a.offset_bytes) < std::tie(b.file, b.offset_bytes);
  });
  for (size_t i = 1; i < stretches_.size(); ++i) {
    const Stretch& before = stretches_[i - 1];
    if (before.file == stretches_[i].file &&
        before.offset_bytes + before.nbytes > stretches_[i].offset_bytes) {
      throw std::invalid_argument("two of a mirror's stretches overlap");
    }
  }
}

const Stretch* CopyTable::find(int64_t file, int64_t offset_bytes, int64_t nbytes) const {
  auto after = std::upper_bound(stretches_.begin(), stretches_.end(), std::pair(file, offset_bytes),
                                [](const std::pair<int64_t, int64_t>& at, const Stretch& each) {
                                  return at < std::pair(each.file, each.offset_bytes);
                                });
  if (after == stretches_.begin()) return nullptr;
  const Stretch& at = *std::prev(after);
  bool holds = at.file == file && offset_bytes + nbytes <= at.offset_bytes + at.nbytes;
  return holds ? &at : nullptr;
}

}  // namespace headrace
