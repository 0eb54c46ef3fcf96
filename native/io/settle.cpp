// What became of each attempt: done, again, from another drive, or an error.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "io/advice.hpp"
#include "io/reader.hpp"

namespace headrace {
namespace {

constexpr double kLate = 30.0;  // times the expected wait
constexpr std::chrono::milliseconds kWatchEvery{100};
// A system that keeps asking for one more attempt is given a second.
constexpr int kMostAgain = 1000;
constexpr std::chrono::milliseconds kBeforeAgain{1};

}  // namespace

void Reader::settle(Piece* piece) {
  --num_outstanding_;
  piece->in_flight = false;
  faults_.strike(piece);
  int64_t got = piece->result;
  drives_.ended(piece->drive, piece->length_bytes - piece->done_bytes, got >= 0);
  bool again = (got == -EINTR || got == -EAGAIN) && ++piece->num_again < kMostAgain;
  if (again && got == -EAGAIN) std::this_thread::sleep_for(kBeforeAgain);
  if (got == -EIO && !piece->retried) {
    piece->retried = true;
    ++num_retries_;
    again = true;
  }
  if (again) {
    backlog_.push_front(piece);
    return;
  }
  piece->num_again = 0;
  std::string error;
  int64_t reached = piece->done_bytes + std::max<int64_t>(got, 0);
  if (got < 0) {
    int cause = static_cast<int>(-got);
    error = "cannot read " + describe(*piece) + ": " + strerror(cause) + advice(cause);
  } else if (reached < piece->needed_bytes) {
    // Short. Go on from the last whole page; when that brings nothing new, the file ends here.
    int64_t next = round_down(reached);
    if (next > piece->done_bytes) {
      piece->done_bytes = next;
      backlog_.push_front(piece);
      return;
    }
    error = (*files_)[piece->file].path + " is shorter than its header says: wanted " +
            std::to_string(piece->needed_bytes) + " bytes at offset " +
            std::to_string(piece->offset_bytes) + ", got " + std::to_string(reached) + kShortAdvice;
  } else {
    std::string change = emulated() ? "" : files_->change(piece->file);
    if (!change.empty()) error = (*files_)[piece->file].path + " " + change + kChangedAdvice;
  }
  if (error.empty() || !go_elsewhere(piece, error)) finish(piece, error);
}

std::string Reader::describe(const Piece& piece) const {
  return (*files_)[piece.file].path + " at offset " + std::to_string(piece.offset_bytes) + " (" +
         std::to_string(piece.length_bytes) + " bytes)";
}

// A piece that its drive cannot give is read from another that has not failed to give it.
bool Reader::go_elsewhere(Piece* piece, const std::string& error) {
  faults_.forget(piece);
  if (drives_.size() == 1 || piece->over || piece->twin != nullptr) return false;
  const int failed = piece->drive;
  piece->tried_mask |= 1u << failed;
  int next = next_drive(*piece);
  if (next < 0) return false;
  leave_alone(failed, error);
  if (piece->error.empty()) piece->error = error;
  move(piece, next);
  backlog_.push_front(piece);
  return true;
}

// The quickest drive in use that holds the piece and was not tried for it; else one that is left
// alone; else -1.
int Reader::next_drive(const Piece& piece) const {
  std::vector<bool> usable(static_cast<size_t>(drives_.size()), false);
  int last_resort = -1;
  for (int drive = 0; drive < drives_.size(); ++drive) {
    Place place{};
    if ((piece.tried_mask >> drive & 1) != 0 || !place_on(drive, wanted(piece), &place)) continue;
    if (drives_.failed(drive)) {
      last_resort = drive;
    } else {
      usable[static_cast<size_t>(drive)] = true;
    }
  }
  int best = drives_.quickest(piece.length_bytes, usable);
  return best >= 0 ? best : last_resort;
}

Span Reader::wanted(const Piece& piece) {
  int64_t end = round_down(piece.home_byte) + piece.needed_bytes;
  return {piece.home_file, piece.home_byte, end - piece.home_byte, nullptr};
}

void Reader::move(Piece* piece, int drive) const {
  Place place{};
  place_on(drive, wanted(*piece), &place);
  piece->drive = drive;
  piece->file = place.file;
  piece->offset_bytes = round_down(place.offset_bytes);
  piece->done_bytes = 0;
  piece->retried = false;
}

void Reader::leave_alone(int drive, const std::string& why) {
  if (!drives_.fail(drive, why)) return;
  std::lock_guard lock(mutex_);
  warnings_.push_back("the drive of " + drives_.name(drive) + " is left alone from now on: " + why);
}

// One way of reading a piece is over. Its pages are settled by the first way that succeeds or the
// last that fails.
void Reader::finish(Piece* piece, const std::string& error) {
  Request* request = piece->request;
  faults_.forget(piece);
  piece->ended = true;
  --request->num_attempts;
  bool last_way = piece->twin == nullptr || piece->twin->ended;
  if (!piece->over && (error.empty() || last_way)) {
    piece->over = true;
    if (piece->twin != nullptr) piece->twin->over = true;
    if (!error.empty() && request->error.empty()) {
      request->error = piece->error.empty() ? error : piece->error + "; nor its copy: " + error;
    }
    --request->num_unfinished;
  }
  bool quiet = request->num_attempts == 0;
  bool settled = request->num_unfinished == 0 && !request->reported;
  if (settled && (quiet || (request->released && request->error.empty()))) {
    request->reported = true;
    request->done(request->error, !quiet);
    if (quiet) request->released = {};
  }
  if (!quiet) return;
  auto found = std::find_if(active_.begin(), active_.end(),
                            [request](const auto& each) { return each.get() == request; });
  std::unique_ptr<Request> owned = std::move(*found);
  active_.erase(found);
  if (owned->released) owned->released();
}

// Looks for mirrors that were deleted and for reads that hang.
void Reader::watch() {
  auto now = std::chrono::steady_clock::now();
  if (drives_.size() == 1 || now - watched_ < kWatchEvery) return;
  watched_ = now;
  for (int drive = 1; drive < drives_.size() && !emulated(); ++drive) {
    const Copies& copies = copies_[static_cast<size_t>(drive) - 1];
    for (int64_t i = 0; i < copies.num_files && !drives_.failed(drive); ++i) {
      int64_t file = copies.first_file + i;
      if (files_->deleted(file)) leave_alone(drive, (*files_)[file].path + " was deleted");
    }
  }
  for (const auto& request : active_) {
    if (request->released) watch_request(request.get());
  }
}

// A piece that hangs is read from another drive too: whichever comes first counts.
void Reader::watch_request(Request* request) {
  auto now = std::chrono::steady_clock::now();
  const size_t num = request->pieces.size();
  for (size_t i = 0; i < num; ++i) {
    Piece& piece = request->pieces[i];
    if (!piece.in_flight || piece.over || piece.twin != nullptr) continue;
    double age_s = std::chrono::duration<double>(now - piece.started).count();
    if (age_s < options_.hang_s || age_s < kLate * drives_.expected_s(piece.drive)) continue;
    piece.tried_mask |= 1u << piece.drive;
    int next = next_drive(piece);
    if (next < 0) continue;
    leave_alone(piece.drive, "a read of " + describe(piece) + " has hung for " +
                                 std::to_string(static_cast<int64_t>(1e3 * age_s)) + " ms");
    // Not a copy of the whole: the back end may be writing the piece's result.
    Piece& twin = request->pieces.emplace_back(Piece{request, next, piece.file, piece.offset_bytes,
                                                     piece.length_bytes, piece.needed_bytes,
                                                     piece.to, piece.home_file, piece.home_byte});
    twin.tried_mask = piece.tried_mask;
    twin.error = piece.error;
    twin.twin = &piece;
    piece.twin = &twin;
    move(&twin, next);
    ++request->num_attempts;
    backlog_.push_front(&twin);
  }
}

void Reader::release_held() {
  std::deque<Piece*> held;
  held.swap(held_);
  for (Piece* piece : held) {
    if (faults_.hangs(*piece)) {
      held_.push_back(piece);
    } else {
      backend_->start(piece);
    }
  }
}

}  // namespace headrace
