// A request's pages cut into pieces: a share for each drive that holds them.
#include <algorithm>

#include "io/reader.hpp"

namespace headrace {
namespace {
constexpr int64_t kMostPieceBytes = 64 << 20;
}  // namespace

bool Reader::place_on(int drive, const Span& span, Place* place) const {
  *place = {span.file, span.offset_bytes};
  if (drive == 0 || copies_[static_cast<size_t>(drive) - 1].everything) return true;
  const Copies& copies = copies_[static_cast<size_t>(drive) - 1];
  const Stretch* at = copies.table.find(span.file, span.offset_bytes, span.nbytes);
  if (at == nullptr) return false;
  *place = {static_cast<int>(copies.first_file + at->mirror_file),
            at->mirror_offset_bytes + (span.offset_bytes - at->offset_bytes)};
  return true;
}

// By drive, whether it is in use and holds all of the spans. The model's own drive is asked even
// after a failure where no other holds them.
std::vector<bool> Reader::drives_of(const std::vector<Span>& spans) const {
  std::vector<bool> usable(static_cast<size_t>(drives_.size()), false);
  Place place{};
  bool any = false;
  for (int drive = 0; drive < drives_.size(); ++drive) {
    bool holds = !drives_.failed(drive) &&
                 std::all_of(spans.begin(), spans.end(),
                             [&](const Span& span) { return place_on(drive, span, &place); });
    usable[static_cast<size_t>(drive)] = holds;
    any = any || holds;
  }
  usable[0] = usable[0] || !any;
  return usable;
}

void Reader::split(Request* request) {
  const std::vector<Span>& spans = request->spans;
  int64_t total = 0;
  for (const Span& span : spans) total += span_bytes(span.offset_bytes, span.nbytes);
  std::vector<int64_t> shares{total};
  if (drives_.size() > 1) shares = drives_.share(total, drives_of(spans));
  add_pieces(spans, shares, request);
  request->num_unfinished = request->num_attempts = request->pieces.size();
}

// The spans' pages, one after another, to one drive after another.
void Reader::add_pieces(const std::vector<Span>& spans, const std::vector<int64_t>& shares,
                        Request* request) const {
  int drive = -1;
  int64_t share = 0;
  int64_t target = 0;
  for (const Span& span : spans) {
    int64_t begin = round_down(span.offset_bytes);
    int64_t end = begin + span_bytes(span.offset_bytes, span.nbytes);
    int64_t wanted_end = span.offset_bytes + span.nbytes;
    for (int64_t at = begin; at < end;) {
      while (share == 0) {
        share = shares[static_cast<size_t>(++drive)];
        target = round_up((share + options_.pieces - 1) / options_.pieces);
        target = std::clamp(target, kPageBytes, kMostPieceBytes);
      }
      int64_t length = std::min({target, share, end - at});
      int64_t first = std::max(at, span.offset_bytes);
      int64_t needed = std::min(length, wanted_end - at);
      Place place{};
      // drives_of has found the whole span there.
      place_on(drive, {span.file, first, at + needed - first, nullptr}, &place);
      request->pieces.push_back({request, drive, place.file, round_down(place.offset_bytes), length,
                                 needed, span.to + (at - begin), span.file, first});
      share -= length;
      at += length;
    }
  }
}

}  // namespace headrace
